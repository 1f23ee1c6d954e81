"""Probes of the bench's self-check: loads on a server with known times, and the figures that must come out.

Figures are compared with the server's log, not with its script, because on a busy machine the server may be late. The
client may be late too without being wrong: errors that this explains are "disturbed", not "wrong".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from llmsched.cli.bench.selfcheck.scripted_server import SCRIPTS, AnswerLog
from llmsched.cli.figures.client_lag import LAG_LIMIT_S
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.engine.latency import Arrival, request_latency, steady_rate, summarise

#: Allowed errors of typical and of tail figures, in seconds: about the delay of a loaded machine's scheduler.
TYPICAL_S, TAIL_S = 0.005, 0.02

_RATE = 100.0
_RATE_REQUESTS = 200
_RATE_SHARE = 0.02

Verdict = Literal["right", "disturbed", "wrong"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Load on one script; `what` says in words what it checks."""

    name: str
    what: str
    load: SyntheticLoad

    @property
    def chat(self) -> bool:
        return self.name == "role"


@dataclass(frozen=True, slots=True)
class FigureCheck:
    """Figure of a probe by the script, by the server's log, and as measured (None: it has no value).

    Times are in ms, rates per second. An error that exceeds `allowed` by at most `excuse` may be due to other work on
    the machine.
    """

    probe: str
    figure: str
    script: float | None
    server: float | None
    measured: float | None
    allowed: float
    excuse: float = 0.0

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
    """Checks of a probe in its last try. `held_up` is the longest time in seconds that client or server had to wait."""

    probe: Probe
    checks: Sequence[FigureCheck]
    held_up: float = 0.0
    tries: int = 1

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the checks."""
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


def checks_of(probe: Probe, figures: Measurement, log: AnswerLog, held_up: float = 0.0) -> list[FigureCheck]:
    """Return the figures of a probe, each beside that of the server's log.

    A `held_up` (seconds) above the allowed error excuses twice as much, because a token may have to wait twice.
    """
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
    """Return the figures that follow from the times of the parts, for requests due at the time `due` on average.

    TTFT and E2E are means, so answers need not be matched with requests.
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
