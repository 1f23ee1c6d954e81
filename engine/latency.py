"""What the figures mean: TTFT, ITL, TPOT, E2E, percentiles, goodput. Server metrics, bench and tune use these alike.

All times are seconds of one clock. Nothing here is ever 0 for want of data: what is not defined is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np

#: One sentence per figure, printed wherever the figure is.
DEFINITIONS: Mapping[str, str] = {
    "TTFT": "from the moment a request should have been sent (at the server: arrived) to its first token",
    "ITL": "gap between one token and the next, one sample per token; k tokens in one chunk are k samples of gap/k",
    "TPOT": "(E2E - TTFT) / (output tokens - 1), one sample per request; undefined for one token",
    "E2E": "from the moment a request should have been sent (at the server: arrived) to its last token",
    "goodput": "requests per second that finished and met every SLO; failed requests count as missed",
    "percentiles": "linear interpolation between the two nearest samples; mean is arithmetic",
}


class Arrival(NamedTuple):
    """Tokens that became visible together: how many (0: the chunk carried none) and when."""

    time: float
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """The figures of one request that got at least one token.

    `itl` has one sample per token after the first arrival; `worst_stall` is the longest gap between two arrivals, None
    if there was only one. `tpot` is None for one token.
    """

    ttft: float
    e2e: float
    tpot: float | None
    itl: tuple[float, ...]
    worst_stall: float | None


def request_latency(start: float, arrivals: Sequence[Arrival]) -> RequestLatency | None:
    """The figures of a request that began at `start`; None if no token came."""
    carried = [arrival for arrival in arrivals if arrival.tokens > 0]
    if not carried:
        return None
    ttft, e2e = carried[0].time - start, carried[-1].time - start
    gaps = [after.time - before.time for before, after in pairwise(carried)]
    return RequestLatency(
        ttft=ttft,
        e2e=e2e,
        tpot=tpot(ttft, e2e, sum(arrival.tokens for arrival in carried)),
        itl=itl_samples(carried),
        worst_stall=max(gaps, default=None),
    )


def itl_samples(arrivals: Sequence[Arrival]) -> tuple[float, ...]:
    """One sample per token: the gap before an arrival, shared equally by its tokens.

    The first arrival gives no sample, because what passed before it is TTFT.
    """
    carried = [arrival for arrival in arrivals if arrival.tokens > 0]
    return tuple(
        (after.time - before.time) / after.tokens for before, after in pairwise(carried) for _ in range(after.tokens)
    )


def tpot(ttft: float, e2e: float, output_tokens: int) -> float | None:
    """Time per output token after the first; None for fewer than two tokens."""
    return (e2e - ttft) / (output_tokens - 1) if output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution in the unit of its samples; every figure but `count` is None where there is no sample."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


def summarise(samples: Sequence[float]) -> Summary:
    """Mean and percentiles (linear interpolation, Hyndman and Fan's type 7)."""
    if not samples:
        return Summary(0, None, None, None, None, None)
    values = np.asarray(samples, dtype=np.float64)
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99), method="linear"))
    return Summary(len(samples), float(values.mean()), p50, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; None: not asked for. `itl` is held against the P99 of a request's own ITL samples."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def given(self) -> dict[str, float]:
        """The targets that were set, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def met_by(self, request: RequestLatency) -> dict[str, bool]:
        """Whether a request met each target; a figure that is undefined for it (ITL of one token) cannot miss."""
        figures = {"ttft": request.ttft, "itl": summarise(request.itl).p99, "tpot": request.tpot, "e2e": request.e2e}
        return {name: (figure := figures[name]) is None or figure <= limit for name, limit in self.given().items()}


@dataclass(frozen=True, slots=True)
class Goodput:
    """How well the SLOs were met. `attainment` has the share of requests that met each target, and that met "all"."""

    requests_per_s: float
    attainment: dict[str, float]


def goodput(slo: Slo, requests: Sequence[RequestLatency], *, failed: int, duration: float) -> Goodput | None:
    """Goodput of a run; None without an SLO, a request or a duration. Failed requests stay in every denominator."""
    total = len(requests) + failed
    if not slo.given() or not total or duration <= 0:
        return None
    verdicts = [slo.met_by(request) for request in requests]
    good = sum(all(verdict.values()) for verdict in verdicts)
    attainment = {name: sum(verdict[name] for verdict in verdicts) / total for name in slo.given()}
    return Goodput(good / duration, {**attainment, "all": good / total})


def steady_rate(arrivals: Sequence[Arrival]) -> float | None:
    """Tokens (or completions) per second from the first arrival to the last, what came first not counted.

    For n single ones that is (n - 1) / (last - first). None where there is no time between them.
    """
    if not arrivals:
        return None
    first, last = min(arrivals), max(arrivals)
    if last.time <= first.time:
        return None
    return (sum(arrival.tokens for arrival in arrivals) - first.tokens) / (last.time - first.time)
