"""Self-check of `bench`. Each probe is a load for a scripted server; its figures are compared with the server's log.

If a delay of the client or the server explains the error of a figure, the verdict on the figure is "disturbed", not
"wrong", and the probe is repeated.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean
from typing import Any, Literal

import httpx

from llmsched.cli import render
from llmsched.cli.bench.report.report_content import ReportContent, Result, Table
from llmsched.cli.bench.selfcheck.scripted_server import SCRIPTS, AnswerLog
from llmsched.cli.figures.client_lag import LAG_LIMIT_S, loop_lags
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.load_run import run_workload
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.percentiles import summarise
from llmsched.engine.progress import Progress, silent
from llmsched.engine.request_latency import Arrival, request_latency, steady_rate

#: Allowed errors in seconds of typical figures (means) and of tail figures (P99 and maximum). They are about the delay
#: that the scheduler of a loaded machine causes.
TYPICAL_S, TAIL_S = 0.005, 0.02

_RATE = 100.0
_RATE_REQUESTS = 200
_RATE_SHARE = 0.02

Verdict = Literal["right", "disturbed", "wrong"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Load that the scripted server answers by the scripts SCRIPTS[name]."""

    name: str
    what: str  # description for the user
    load: SyntheticLoad

    @property
    def chat(self) -> bool:
        return self.name == "role"


@dataclass(frozen=True, slots=True)
class FigureCheck:
    """Check of one figure. Times are in ms, rates per second."""

    probe: str
    figure: str
    script: float | None  # value of a server that writes on time
    server: float | None  # value by the server's log
    measured: float | None  # value that `bench` computed
    allowed: float  # largest difference between `measured` and `server`
    excuse: float = 0.0  # further difference that other work on the machine may cause

    @property
    def error(self) -> float | None:
        return None if self.server is None or self.measured is None else self.measured - self.server

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    @property
    def verdict(self) -> Verdict:
        if self.error is None or abs(self.error) > self.allowed + self.excuse:
            return "wrong"
        return "right" if abs(self.error) <= self.allowed else "disturbed"


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """Checks of a probe's last try."""

    probe: Probe
    checks: Sequence[FigureCheck]
    held_up: float = 0.0  # longest delay of client or server in seconds
    tries: int = 1

    @property
    def verdict(self) -> Verdict:
        verdicts = {check.verdict for check in self.checks}
        return "wrong" if "wrong" in verdicts else "disturbed" if "disturbed" in verdicts else "right"


def _load(count: int, **settings: Any) -> SyntheticLoad:
    return SyntheticLoad(num_prompts=count, input_len=8, output_len=100, **settings)


PROBES = (
    Probe("steady", "40 tokens one by one", _load(4, max_concurrency=4)),
    Probe("chunks", "50 tokens in chunks of 10", _load(4, max_concurrency=4)),
    Probe("role", "a role and an empty chunk before the first token", _load(4, max_concurrency=4)),
    Probe("stall", "a stall of half a second", _load(4, max_concurrency=4)),
    Probe("crowd", "64 streams of 50 tokens/s", _load(64, request_rate=128.0, arrivals="constant")),
    Probe("rate", "100 requests/s on schedule", _load(_RATE_REQUESTS, request_rate=_RATE, arrivals="constant")),
    Probe("failures", "streams that are cut, broken, refused or empty", _load(5, max_concurrency=1)),
)


#: Maximum number of tries of a probe, and the pause between two tries in seconds.
_TRIES, _PAUSE_S = 3, 0.5

#: Seconds between two measurements of the event loop's lag.
_LOOK_S = 0.002

#: One request before the probes, so that the probes do not measure the time of imports.
_WARM_UP = Probe("warm-up", "one request", SyntheticLoad(num_prompts=1, input_len=8, output_len=100))


async def tried(probe: Probe, attempt: Callable[[], Awaitable[tuple[Sequence[FigureCheck], float]]]) -> ProbeOutcome:
    """Run a probe, and repeat it at most twice while a figure is not right and the machine seems busy."""
    tries = 1
    while True:
        outcome = ProbeOutcome(probe, *await attempt(), tries)
        if outcome.verdict == "right" or outcome.held_up <= TYPICAL_S or tries == _TRIES:
            return outcome
        await asyncio.sleep(_PAUSE_S)
        tries += 1


async def _attempt(root: str, probe: Probe) -> tuple[list[FigureCheck], float]:
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
    """Start the scripted server and yield its URL. Raises LlmschedError if it does not start."""
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
        figures = await run_workload(target, probe.load, Slo(), ids=ids, timeout=20.0, progress=silent)
    finally:
        await target.close()
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{root}/{probe.name}/log")
    return figures, json.loads(answer.text)


async def bench_self(progress: Progress) -> Result:
    """Run all probes. Raises LlmschedError if the scripted server does not start."""
    outcomes: list[ProbeOutcome] = []
    async with scripted_server() as root:
        await _run(root, _WARM_UP)
        for number, probe in enumerate(PROBES):
            progress("probes", number, len(PROBES))
            outcomes.append(await tried(probe, partial(_attempt, root, probe)))
    report = as_json(outcomes)
    return Result(report, content(outcomes), report["right"], [])


def as_json(outcomes: Sequence[ProbeOutcome]) -> dict[str, Any]:
    """Return the checks as JSON. `right` means that all figures are right, `wrong` that at least one is wrong."""
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
    columns = ["", "script", "server", "measured", "error", "allowed", ""]
    tables = []
    for outcome in outcomes:
        rows = []
        for check in outcome.checks:
            figures = (check.script, check.server, check.measured, check.error, check.allowed)
            cells = ["n/a" if figure is None else f"{figure:.2f}".removesuffix(".00") for figure in figures]
            rows.append([check.figure, *cells, "" if check.right else check.verdict])
        tables.append(Table(f"{outcome.probe.name}: {outcome.probe.what} (times in ms)", columns, rows))
    return ReportContent(
        notes=["MEASURED: the bench itself, against a server in another process with known times"],
        tables=tables,
        conclusions=conclusions(outcomes),
    )


def conclusions(outcomes: Sequence[ProbeOutcome]) -> list[str]:
    """Return sentences that say which figures are wrong or uncertain, and what the user can do."""
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


def checks_of(probe: Probe, figures: Measurement, log: AnswerLog, held_up: float = 0.0) -> list[FigureCheck]:
    """Compare the figures of a probe with the log. `held_up` is the longest delay of client or server in seconds."""
    if probe.name == "failures":
        expected = {"cut without [DONE]": 1, "error event": 1, "http 500": 1, "empty stream": 1}
        counts = [("completed", 1, figures.requests.completed), ("failed", len(expected), figures.requests.failed)]
        counts += [(reason, count, figures.requests.failures.get(reason, 0)) for reason, count in expected.items()]
        return [FigureCheck(probe.name, name, count, count, measured, 0) for name, count, measured in counts]
    excuse = 2 * held_up if held_up > TYPICAL_S else 0.0
    if probe.name == "rate":
        return _rate_checks(probe, figures, log, excuse)
    scripts = SCRIPTS[probe.name]
    planned = [(0.0, [(part.at, part.tokens) for part in script.parts]) for script in scripts]
    due = mean(record.scheduled for record in figures.run.records)
    script, server = _figures_of(planned, 0.0), _figures_of(log, due)
    measured = {
        "TTFT mean": figures.latency.ttft.mean,
        "ITL mean": figures.latency.itl.mean,
        "ITL P99": figures.latency.itl.p99,
        "TPOT mean": figures.latency.tpot.mean,
        "E2E mean": figures.latency.e2e.mean,
        "worst stall": figures.latency.worst_stall,
    }
    checks = []
    for name, value in measured.items():
        allowed = TAIL_S if name in ("ITL P99", "worst stall") else TYPICAL_S
        times = _ms(script[name]), _ms(server[name]), _ms(value)
        checks.append(FigureCheck(probe.name, name, *times, 1e3 * allowed, 1e3 * excuse))
    tokens = scripts[0].tokens * len(log)
    lag = FigureCheck(probe.name, "client lag P99", 0.0, 0.0, _ms(figures.client.send.p99), 1e3 * TAIL_S, 1e3 * excuse)
    return [*checks, lag, FigureCheck(probe.name, "tokens", tokens, tokens, figures.tokens.output, 0)]


def _figures_of(log: Sequence[tuple[float, Sequence[tuple[float, int]]]], due: float) -> Mapping[str, float | None]:
    """Compute figures from the server's log. Latencies are measured from `due`, the mean due time of the requests."""
    arrivals = [[Arrival(at, tokens) for at, tokens in written] for _, written in log]
    requests = [latency for one in arrivals if (latency := request_latency(due, one)) is not None]
    itl = summarise([gap for latency in requests for gap in latency.itl])
    return {
        "TTFT mean": summarise([latency.ttft for latency in requests]).mean,
        "ITL mean": itl.mean,
        "ITL P99": itl.p99,
        "TPOT mean": summarise([latency.tpot for latency in requests if latency.tpot is not None]).mean,
        "E2E mean": summarise([latency.e2e for latency in requests]).mean,
        "worst stall": max((one.worst_stall for one in requests if one.worst_stall is not None), default=None),
    }


def _rate_checks(probe: Probe, figures: Measurement, log: AnswerLog, excuse: float) -> list[FigureCheck]:
    came = steady_rate([Arrival(at, 1) for at, _ in log])
    loop_lag = None if figures.client.loop is None else figures.client.loop.p99
    lags = {"client lag P99": figures.client.send.p99, "loop lag P99": loop_lag}
    # One late request lengthens the time in which all of them arrive.
    excused_rate = _RATE * excuse / (_RATE_REQUESTS / _RATE)
    rate = FigureCheck(probe.name, "requests/s", _RATE, came, figures.rates.achieved, _RATE_SHARE * _RATE, excused_rate)
    allowed = 1e3 * LAG_LIMIT_S
    return [rate, *(FigureCheck(probe.name, n, 0.0, 0.0, _ms(lag), allowed, 1e3 * excuse) for n, lag in lags.items())]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
