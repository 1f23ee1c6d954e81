"""What the figures mean: TTFT, ITL, TPOT, E2E, percentiles, goodput. Server metrics, bench and tune use these alike.

All times are seconds of one clock. Nothing here is ever 0 for want of data: what is not defined is None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from llmsched.engine.errors import ConfigError, LlmschedError

#: One sentence per figure, printed wherever the figure is.
DEFINITIONS: Mapping[str, str] = {
    "TTFT": "from the moment a request should have been sent (at the server: arrived) to its first token",
    "ITL": "gap between one token and the next, one sample per token; k tokens in one chunk are k samples of gap/k",
    "TPOT": "(E2E - TTFT) / (output tokens - 1), one sample per request; undefined for one token",
    "E2E": "from the moment a request should have been sent (at the server: arrived) to its last token",
    "goodput": "requests per second that finished and met every SLO; failed requests count as missed",
    "SLO of ITL": "held against one figure of each request's own ITL samples (P99 unless another was asked for)",
    "stall": "gap between two arrivals of tokens of one request",
    "reading": (
        "a reader begins at the first token, takes the same time for every token and never waits for what is there "
        "already; a token is late when the reader had to wait for it"
    ),
    "percentiles": "linear interpolation between the two nearest samples; mean is arithmetic",
    "P99 interval": "95 % bootstrap interval over whole requests; with few requests its upper end is too low",
    "steady": (
        "rates without ramp and drain: from one median E2E after the start to the first end after the last request was "
        "sent, or, where that is too short a time, from the first token (end) to the end of the run"
    ),
}


#: Tokens per second that a reader takes in: about 450 English words a minute, which few people exceed.
READER_SPEED = 10.0


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


class Stall(NamedTuple):
    """The wait of `seconds` that began at the time `at`, when `tokens_before` tokens of its request had come."""

    seconds: float
    at: float
    tokens_before: int


def worst_stall(arrivals: Sequence[Arrival]) -> Stall | None:
    """The longest gap between two arrivals of tokens, the first of those equal; None if there was only one."""
    worst, before, last = None, 0, None
    for arrival in arrivals:
        if arrival.tokens <= 0:
            continue
        if last is not None and (worst is None or arrival.time - last > worst.seconds):
            worst = Stall(arrival.time - last, last, before)
        before, last = before + arrival.tokens, arrival.time
    return worst


def tpot(ttft: float, e2e: float, output_tokens: int) -> float | None:
    """Time per output token after the first; None for fewer than two tokens."""
    return (e2e - ttft) / (output_tokens - 1) if output_tokens > 1 else None


def reading_waits(arrivals: Sequence[Arrival], tokens_per_s: float) -> list[float]:
    """How long (seconds) a reader of that speed had to wait, one entry per token that was late.

    The reader takes up each token as soon as it has come and the one before is read; waiting moves the rest of the
    reading back, so that one stall makes one token late and not all that follow.
    """
    waits: list[float] = []
    free = math.inf
    for time, tokens in arrivals:
        if tokens <= 0:
            continue
        # A tenth of a microsecond: clocks are not exact enough to tell less from being on time.
        if time - free > 1e-7:
            waits.append(time - free)
        free = (time if free == math.inf else max(time, free)) + tokens / tokens_per_s
    return waits


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


_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


def statistic(samples: Sequence[float], name: str) -> float | None:
    """One figure of the samples: "mean", "max" or a percentile such as "p50" or "p99.9"; None without a sample.

    Raises LlmschedError for another name.
    """
    share = _share(name)
    if not samples:
        return None
    if share is None:
        return sum(samples) / len(samples)
    ordered = sorted(samples)
    whole, part = divmod(share * (len(ordered) - 1), 1)
    low, high = ordered[int(whole)], ordered[min(int(whole) + 1, len(ordered) - 1)]
    return low + part * (high - low)


def _share(name: str) -> float | None:
    """The percentile that a statistic is, as a share; None: the mean."""
    if name in ("mean", "max"):
        return None if name == "mean" else 1.0
    if (match := _PERCENTILE.fullmatch(name)) is None or not float(match[1]):
        raise LlmschedError(f"{name!r} is no statistic; allowed are mean, max and percentiles such as p50 or p99.9")
    return float(match[1]) / 100


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; None: not asked for. `itl` is held against `itl_statistic` of a request's own ITL samples.

    `reader_speed` (tokens per second) is that of the reader who judges the pauses; it is no target.
    Raises LlmschedError for what is no statistic, and for a speed that is not above 0.
    """

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    itl_statistic: str = "p99"
    reader_speed: float = READER_SPEED

    def __post_init__(self) -> None:
        _share(self.itl_statistic)
        if not 0 < self.reader_speed < math.inf:
            raise ConfigError(
                "reader_speed",
                f"{self.reader_speed:g} is out of range; allowed is above 0 tokens per second, and finite",
            )

    def given(self) -> dict[str, float]:
        """The targets that were set, by name."""
        targets = {"ttft": self.ttft, "itl": self.itl, "tpot": self.tpot, "e2e": self.e2e}
        return {name: limit for name, limit in targets.items() if limit is not None}

    def met_by(self, request: RequestLatency) -> dict[str, bool]:
        """Whether a request met each target; a figure that is undefined for it (ITL of one token) cannot miss."""
        itl = None if self.itl is None else statistic(request.itl, self.itl_statistic)
        figures = {"ttft": request.ttft, "itl": itl, "tpot": request.tpot, "e2e": request.e2e}
        return {name: (figure := figures[name]) is None or figure <= limit for name, limit in self.given().items()}


@dataclass(frozen=True, slots=True)
class Goodput:
    """How well the SLOs were met. `attainment` has the share of requests that met each target, and that met "all".

    `missed` counts the served requests that missed each target, `missed_alone` those that missed it and no other: as
    many would be won if that target alone were met.
    """

    requests_per_s: float
    attainment: dict[str, float]
    missed: dict[str, int] = field(default_factory=dict)
    missed_alone: dict[str, int] = field(default_factory=dict)


def goodput(slo: Slo, requests: Sequence[RequestLatency], *, failed: int, duration: float) -> Goodput | None:
    """Goodput of a run; None without an SLO or a request, or if requests were good in no time at all.

    Failed requests stay in every denominator.
    """
    total = len(requests) + failed
    if not slo.given() or not total:
        return None
    misses = [[name for name, met in slo.met_by(request).items() if not met] for request in requests]
    good = sum(not missed for missed in misses)
    if good and duration <= 0:
        return None
    missed = {name: sum(name in one for one in misses) for name in slo.given()}
    attainment = {name: (len(requests) - count) / total for name, count in missed.items()}
    alone = {name: sum(one == [name] for one in misses) for name in slo.given()}
    return Goodput(good / duration if good else 0.0, {**attainment, "all": good / total}, missed, alone)


def steady_rate(arrivals: Sequence[Arrival], end: float | None = None) -> float | None:
    """Tokens (or completions) per second from the first arrival to the last, what came at the first moment not counted.

    For n single ones that is (n - 1) / (last - first). `end`: a time up to which more could have come, so that silence
    at the end is not left out. None where there is no time between them.
    """
    if not arrivals:
        return None
    first, last = min(arrivals).time, max(max(arrivals).time, -math.inf if end is None else end)
    if last <= first:
        return None
    return sum(arrival.tokens for arrival in arrivals if arrival.time > first) / (last - first)
