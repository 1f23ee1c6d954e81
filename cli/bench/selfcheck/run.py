"""Does the bench measure right on this machine? It loads a server whose times are known, and compares.

The longest that other work kept the client or the server waiting is noted; a probe that it disturbed is tried again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import httpx

from llmsched.cli.bench.selfcheck.check import PROBES, TYPICAL_S, Check, Outcome, Probe, checks_of
from llmsched.cli.bench.selfcheck.scripts import SCRIPTS
from llmsched.cli.bench.selfcheck.server import Log
from llmsched.cli.figures.client_lag import loop_lags
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic import Workload
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.load_run import run_workload
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress, silent

_TIMEOUT_S = 20.0

#: How often a disturbed probe is tried at most, and how long it is waited before the next try, in seconds.
_TRIES, _PAUSE_S = 3, 0.5

#: How often it is looked whether the client is kept from working, in seconds.
_LOOK_S = 0.002

#: What a first request loads and builds is no part of what is checked.
_WARM_UP = Probe("warm-up", "one request", Workload(num_prompts=1, input_len=8, output_len=100))


async def self_check(progress: Progress) -> list[Outcome]:
    """All probes, one after the other. Raises LlmschedError if the server cannot be started."""
    outcomes: list[Outcome] = []
    async with scripted_server() as root:
        await _run(root, _WARM_UP)
        for number, probe in enumerate(PROBES):
            progress("probes", number, len(PROBES))
            outcomes.append(await tried(probe, partial(_attempt, root, probe)))
    return outcomes


async def tried(probe: Probe, attempt: Callable[[], Awaitable[tuple[Sequence[Check], float]]]) -> Outcome:
    """Attempt a probe, and again while it is not right and was held up for longer than a figure may be off.

    `attempt` gives the checks, and the seconds for which it was held up.
    """
    tries = 1
    while True:
        outcome = Outcome(probe, *await attempt(), tries)
        if outcome.verdict == "right" or outcome.held_up <= TYPICAL_S or tries == _TRIES:
            return outcome
        await asyncio.sleep(_PAUSE_S)
        tries += 1


async def _attempt(root: str, probe: Probe) -> tuple[list[Check], float]:
    async with loop_lags(_LOOK_S) as lags:
        figures, log = await _run(root, probe)
    held_up = max([_LOOK_S + max((lag.machine for lag in lags), default=0.0), _most_late(probe, log)])
    return checks_of(probe, figures, log, held_up), held_up


def _most_late(probe: Probe, log: Log) -> float:
    """By how many seconds the server wrote a part later than its script wants it, at most."""
    scripts = SCRIPTS[probe.name]
    late = [
        at - (came + part.at)
        for number, (came, written) in enumerate(log)
        for part, (at, _) in zip(scripts[number % len(scripts)].parts, written, strict=False)
    ]
    return max(late, default=0.0)


@asynccontextmanager
async def scripted_server() -> AsyncIterator[str]:
    """The URL of the scripted server, which runs until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llmsched.cli.bench.selfcheck.server"),
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


async def _run(root: str, probe: Probe) -> tuple[Measurement, Log]:
    target = HttpTarget(HttpOptions(f"{root}/{probe.name}", endpoint="chat" if probe.chat else "completions"))
    try:
        ids = None if probe.chat else COMMON_IDS
        figures = await run_workload(target, probe.load, Slo(), ids=ids, timeout=_TIMEOUT_S, progress=silent)
    finally:
        await target.close()
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{root}/{probe.name}/log")
    return figures, json.loads(answer.text)
