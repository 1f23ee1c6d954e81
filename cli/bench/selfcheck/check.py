"""Does the bench measure right on this machine? It loads a server whose times are known, and compares.

Figures are held against what the server says that it really did, not against its script: on a busy machine it may be
late itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

import httpx

from llmsched.cli.bench.figures.measure import LAG_LIMIT_S, Measurement
from llmsched.cli.bench.load.prompts import COMMON_IDS
from llmsched.cli.bench.load.synthetic import Workload
from llmsched.cli.bench.run import run_workload
from llmsched.cli.bench.selfcheck.scripts import SCRIPTS
from llmsched.cli.bench.selfcheck.server import Log
from llmsched.cli.bench.target.client import HttpOptions, HttpTarget
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import Arrival, Slo, request_latency, steady_rate, summarise
from llmsched.engine.progress import Progress, silent

#: How far a typical figure and one of the tail may be off, in seconds: about what a loaded machine's scheduler takes.
TYPICAL_S, TAIL_S = 0.005, 0.02

_RATE = 100.0
_RATE_SHARE = 0.02
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One load on one script; `what` says in words what is checked by it."""

    name: str
    what: str
    load: Workload

    @property
    def chat(self) -> bool:
        return self.name == "role"


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of a probe: by the script, as the server did it, as it was measured. None: there is none.

    Times are in ms, rates per second.
    """

    probe: str
    figure: str
    script: float | None
    server: float | None
    measured: float | None
    allowed: float

    @property
    def error(self) -> float | None:
        return None if self.server is None or self.measured is None else self.measured - self.server

    @property
    def right(self) -> bool:
        return self.error is not None and abs(self.error) <= self.allowed


def _load(count: int, **settings: Any) -> Workload:
    return Workload(num_prompts=count, input_len=8, output_len=100, **settings)


PROBES = (
    Probe("steady", "40 tokens one by one", _load(4, max_concurrency=4)),
    Probe("chunks", "50 tokens in chunks of 10", _load(4, max_concurrency=4)),
    Probe("role", "a role and an empty chunk before the first token", _load(4, max_concurrency=4)),
    Probe("stall", "a stall of half a second", _load(4, max_concurrency=4)),
    Probe("crowd", "64 streams of 50 tokens/s", _load(64, request_rate=128.0, arrivals="constant")),
    Probe("rate", "100 requests/s on schedule", _load(200, request_rate=_RATE, arrivals="constant")),
    Probe("failures", "streams that are cut, broken, refused or empty", _load(5, max_concurrency=1)),
)

#: What a first request loads and builds is no part of what is checked.
_WARM_UP = Probe("warm-up", "one request", _load(1))


async def self_check(progress: Progress) -> list[Check]:
    """All probes, one after the other. Raises LlmschedError if the server cannot be started."""
    checks: list[Check] = []
    async with _scripted_server() as root:
        await _run(root, _WARM_UP)
        for number, probe in enumerate(PROBES):
            progress("probes", number, len(PROBES))
            figures, log = await _run(root, probe)
            checks += checks_of(probe, figures, log)
    return checks


@asynccontextmanager
async def _scripted_server() -> AsyncIterator[str]:
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


def checks_of(probe: Probe, figures: Measurement, log: Log) -> list[Check]:
    """The figures of a probe, each beside what the server says that it did."""
    if probe.name == "failures":
        return _failure_checks(probe, figures)
    if probe.name == "rate":
        return _rate_checks(probe, figures, log)
    scripts = SCRIPTS[probe.name]
    planned = [(0.0, [(part.at, part.tokens) for part in script.parts]) for script in scripts]
    due = mean(record.scheduled for record in figures.records)
    script, server = _figures_of(planned, 0.0), _figures_of(log, due)
    measured = {
        "TTFT mean": figures.ttft.mean,
        "ITL mean": figures.itl.mean,
        "ITL P99": figures.itl.p99,
        "TPOT mean": figures.tpot.mean,
        "E2E mean": figures.e2e.mean,
        "worst stall": figures.worst_stall,
    }
    checks = [
        Check(probe.name, name, _ms(script[name]), _ms(server[name]), _ms(value), 1e3 * _allowed(name))
        for name, value in measured.items()
    ]
    tokens = scripts[0].tokens * len(log)
    lag = Check(probe.name, "client lag P99", 0.0, 0.0, _ms(figures.client_lag.p99), 1e3 * TAIL_S)
    return [*checks, lag, Check(probe.name, "tokens", tokens, tokens, figures.output_tokens, 0)]


def _figures_of(log: Sequence[tuple[float, Sequence[tuple[float, int]]]], due: float) -> Mapping[str, float | None]:
    """The figures that follow from when parts were written, of requests that were due at the time `due` on average.

    TTFT and E2E are means, of which it need not be known which request is which.
    """
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


def _allowed(figure: str) -> float:
    return TAIL_S if figure in ("ITL P99", "worst stall") else TYPICAL_S


def _rate_checks(probe: Probe, figures: Measurement, log: Log) -> list[Check]:
    came = steady_rate([Arrival(at, 1) for at, _ in log])
    loop_lag = None if figures.loop_lag is None else figures.loop_lag.p99
    lags = {"client lag P99": figures.client_lag.p99, "loop lag P99": loop_lag}
    return [
        Check(probe.name, "requests/s", _RATE, came, figures.achieved_rate, _RATE_SHARE * _RATE),
        *(Check(probe.name, name, 0.0, 0.0, _ms(lag), 1e3 * LAG_LIMIT_S) for name, lag in lags.items()),
    ]


def _failure_checks(probe: Probe, figures: Measurement) -> list[Check]:
    expected = {"cut without [DONE]": 1, "error event": 1, "http 500": 1, "empty stream": 1}
    counts = [("completed", 1, figures.completed), ("failed", len(expected), figures.failed)]
    counts += [(reason, count, figures.failures.get(reason, 0)) for reason, count in expected.items()]
    return [Check(probe.name, name, count, count, measured, 0) for name, count, measured in counts]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
