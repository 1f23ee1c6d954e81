"""`bench --self-check`: the bench loads a server with known times and compares its figures.

A probe that other work on this machine disturbed is tried again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import httpx

from llmsched.cli import render
from llmsched.cli.bench.report.report_content import ReportContent, Result, Table
from llmsched.cli.bench.selfcheck.probes import PROBES, TYPICAL_S, FigureCheck, Probe, ProbeOutcome, Verdict, checks_of
from llmsched.cli.bench.selfcheck.scripted_server import SCRIPTS, AnswerLog
from llmsched.cli.figures.client_lag import loop_lags
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.load_run import run_workload
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress, silent

_TIMEOUT_S = 20.0

#: Most tries of a disturbed probe, and the pause in seconds before the next one.
_TRIES, _PAUSE_S = 3, 0.5

#: Seconds between two measurements of the event loop's lag.
_LOOK_S = 0.002

#: One request before the probes, so that they do not measure imports and the like.
_WARM_UP = Probe("warm-up", "one request", SyntheticLoad(num_prompts=1, input_len=8, output_len=100))


async def tried(probe: Probe, attempt: Callable[[], Awaitable[tuple[Sequence[FigureCheck], float]]]) -> ProbeOutcome:
    """Attempt a probe, and again while it is not right and was held up for longer than the allowed error.

    `attempt` returns the checks and the seconds for which it was held up.
    """
    tries = 1
    while True:
        outcome = ProbeOutcome(probe, *await attempt(), tries)
        if outcome.verdict == "right" or outcome.held_up <= TYPICAL_S or tries == _TRIES:
            return outcome
        await asyncio.sleep(_PAUSE_S)
        tries += 1


async def _attempt(root: str, probe: Probe) -> tuple[list[FigureCheck], float]:
    """Return the checks of a probe, and the longest time in seconds that client or server was held up."""
    async with loop_lags(_LOOK_S) as lags:
        figures, log = await _run(root, probe)
    scripts = SCRIPTS[probe.name]
    late = [
        at - (came + part.at)
        for number, (came, written) in enumerate(log)
        for part, (at, _) in zip(scripts[number % len(scripts)].parts, written, strict=False)
    ]
    held_up = max(_LOOK_S + max((lag.machine for lag in lags), default=0.0), *late)
    return checks_of(probe, figures, log, held_up), held_up


@asynccontextmanager
async def scripted_server() -> AsyncIterator[str]:
    """Start the scripted server, yield its URL, and stop it when the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llmsched.cli.bench.selfcheck.scripted_server"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not (port := await process.stdout.readline()):
            raise LlmschedError("the server of the self-check did not start")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        process.stdin.close()
        await process.wait()


async def _run(root: str, probe: Probe) -> tuple[Measurement, AnswerLog]:
    target = HttpTarget(HttpOptions(f"{root}/{probe.name}", endpoint="chat" if probe.chat else "completions"))
    try:
        ids = None if probe.chat else COMMON_IDS
        figures = await run_workload(target, probe.load, Slo(), ids=ids, timeout=_TIMEOUT_S, progress=silent)
    finally:
        await target.close()
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{root}/{probe.name}/log")
    return figures, json.loads(answer.text)


async def bench_self(progress: Progress) -> Result:
    """Run all probes in turn. Raise LlmschedError if the server cannot be started."""
    outcomes: list[ProbeOutcome] = []
    async with scripted_server() as root:
        await _run(root, _WARM_UP)
        for number, probe in enumerate(PROBES):
            progress("probes", number, len(PROBES))
            outcomes.append(await tried(probe, partial(_attempt, root, probe)))
    report = as_json(outcomes)
    return Result(report, content(outcomes), report["right"], [])


def as_json(outcomes: Sequence[ProbeOutcome]) -> dict[str, Any]:
    """Return the checks as JSON. Times are in ms, rates per second; `error` is measured - server.

    `right`: all figures are. `wrong`: some figure is; where both are false, a probe was disturbed.
    """
    return {
        "measured": True,
        "right": all(outcome.verdict == "right" for outcome in outcomes),
        "wrong": any(outcome.verdict == "wrong" for outcome in outcomes),
        "probes": [
            {"probe": one.probe.name, "verdict": one.verdict, "tries": one.tries, "held_up_ms": 1e3 * one.held_up}
            for one in outcomes
        ],
        "checks": [
            {**asdict(check), "error": check.error, "right": check.right, "verdict": check.verdict}
            for outcome in outcomes
            for check in outcome.checks
        ],
    }


def content(outcomes: Sequence[ProbeOutcome]) -> ReportContent:
    """Return the checks as tables, with conclusions."""
    columns = ["", "script", "server", "measured", "error", "allowed", ""]
    return ReportContent(
        notes=["MEASURED: the bench itself, against a server in another process with known times"],
        tables=[
            Table(f"{one.probe.name}: {one.probe.what} (times in ms)", columns, [_row(check) for check in one.checks])
            for one in outcomes
        ],
        conclusions=conclusions(outcomes),
    )


def conclusions(outcomes: Sequence[ProbeOutcome]) -> list[str]:
    """Return the conclusions from the checks, in sentences."""
    found, checks = [], [check for outcome in outcomes for check in outcome.checks]
    if again := [f"{outcome.probe.name} ({outcome.tries} tries)" for outcome in outcomes if outcome.tries > 1]:
        found.append(f"tried again, because this machine was busy with other work: {', '.join(again)}")
    if wrong := _named(checks, "wrong"):
        found.append(
            f"wrong: {wrong}, by more than other work on this machine explains. Benchmarks from this machine have the "
            "same error; run them on another one"
        )
    if unknown := _named(checks, "disturbed"):
        most = max(outcome.held_up for outcome in outcomes if outcome.verdict != "right")
        found.append(
            f"uncertain: {unknown}. Other work made the bench wait for up to {render.human_seconds(most)}; stop that "
            "work, or run the bench on another machine"
        )
    if not (wrong or unknown):
        found.append(f"all {len(checks)} figures are within the allowed error")
    return found


def _named(checks: Sequence[FigureCheck], verdict: Verdict) -> str:
    return ", ".join(f"{check.probe} {check.figure}" for check in checks if check.verdict == verdict)


def _row(check: FigureCheck) -> list[str]:
    figures = (check.script, check.server, check.measured, check.error, check.allowed)
    cells = ["n/a" if figure is None else f"{figure:.2f}".removesuffix(".00") for figure in figures]
    return [check.figure, *cells, "" if check.right else check.verdict]
