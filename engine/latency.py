"""Definitions of TTFT, ITL, TPOT, E2E, percentiles and goodput, for server metrics, bench and tune alike.

All times are seconds of one clock. A figure that is undefined for lack of data is None, never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from llmsched.engine.errors import LlmschedError, check_range

#: Definition of each figure, printed with it.
DEFINITIONS: Mapping[str, str] = {
    "TTFT": "from the moment a request should have been sent (at the server: arrived) to its first token",
    "ITL": "gap between one token and the next, one sample per token; k tokens in one chunk are k samples of gap/k",
    "TPOT": "(E2E - TTFT) / (output tokens - 1), one sample per request; undefined for one token",
    "E2E": "from the moment a request should have been sent (at the server: arrived) to its last token",
    "goodput": "requests per second that finished and met every SLO; failed requests count as missed",
    "SLO of ITL": "compared with one statistic of each request's ITL samples (P99 unless another is chosen)",
    "stall": "gap between two arrivals of tokens of one request",
    "reading": (
        "a reader starts at the first token and reads at a constant speed; a token is late if it arrives after the "
        "reader has finished the one before"
    ),
    "percentiles": "linear interpolation between the two nearest samples; mean is arithmetic",
    "P99 interval": "95 % bootstrap interval over whole requests; with few requests its upper end is too low",
    "steady": (
        "rates in the steady state (ramp-up and ramp-down excluded): from one median E2E after the start of the run to "
        "the first completion after the last request was sent; if that is too short, from the first token (for "
        "requests/s: the first completion) to the end of the run"
    ),
}


#: Reading speed in tokens per second: about 450 English words a minute, which few people exceed.
READER_SPEED = 10.0


class Arrival(NamedTuple):
    """Tokens that arrived together at `time`; 0 tokens for a chunk without text."""

    time: float
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Latencies in seconds of a request that received at least one token.

    `itl` has one sample per token after the first arrival: the gap before its arrival, divided equally among the tokens
    that arrived together. `worst_stall` is the longest gap between two arrivals, None for a single arrival. `tpot` is
    None for a single token.
    """

    ttft: float
    e2e: float
    tpot: float | None
    itl: tuple[float, ...]
    worst_stall: float | None


def request_latency(start: float, arrivals: Sequence[Arrival]) -> RequestLatency | None:
    """Return the latencies of a request that started at `start`; None if it received no token."""
    carried = [arrival for arrival in arrivals if arrival.tokens > 0]
    if not carried:
        return None
    ttft, e2e = carried[0].time - start, carried[-1].time - start
    stall = worst_stall(carried)
    return RequestLatency(
        ttft=ttft,
        e2e=e2e,
        tpot=tpot(ttft, e2e, sum(arrival.tokens for arrival in carried)),
        itl=tuple(
            (after.time - before.time) / after.tokens
            for before, after in pairwise(carried)
            for _ in range(after.tokens)
        ),
        worst_stall=None if stall is None else stall.seconds,
    )


class Stall(NamedTuple):
    """Gap of `seconds` that began at the time `at`, after `tokens_before` tokens of the request."""

    seconds: float
    at: float
    tokens_before: int


def worst_stall(arrivals: Sequence[Arrival]) -> Stall | None:
    """Return the longest gap between two arrivals of tokens (the first if equal); None for fewer than two arrivals."""
    carried = [arrival for arrival in arrivals if arrival.tokens > 0]
    totals = accumulate(arrival.tokens for arrival in carried)
    stalls = [
        Stall(new.time - last.time, last.time, before)
        for (last, new), before in zip(pairwise(carried), totals, strict=False)
    ]
    return max(stalls, key=lambda stall: stall.seconds, default=None)


def tpot(ttft: float, e2e: float, output_tokens: int) -> float | None:
    """Return the time per output token after the first; None for fewer than two tokens."""
    return (e2e - ttft) / (output_tokens - 1) if output_tokens > 1 else None


def reading_waits(arrivals: Sequence[Arrival], tokens_per_s: float) -> list[float]:
    """Return the seconds that a reader of this speed waited for each late token.

    The reader starts a token as soon as it has arrived and the previous token is read. A wait delays all further
    reading, so one stall makes one token late, not all that follow.
    """
    waits: list[float] = []
    free = math.inf
    for time, tokens in arrivals:
        if tokens <= 0:
            continue
        # Clocks do not resolve less than a tenth of a microsecond.
        if time - free > 1e-7:
            waits.append(time - free)
        free = (time if free == math.inf else max(time, free)) + tokens / tokens_per_s
    return waits


_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a distribution, in the unit of its samples; all but `count` are None without samples.

    Reports get their statistics and headings from these fields. To add a percentile, add a field of its name.
    """

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


#: Names of the percentiles in a Summary.
PERCENTILES = tuple(f.name for f in fields(Summary) if _PERCENTILE.fullmatch(f.name))


def summarise(samples: Sequence[float]) -> Summary:
    """Return mean, maximum and percentiles (linear interpolation, type 7 of Hyndman and Fan)."""
    if not samples:
        return Summary()
    values = np.asarray(samples, dtype=np.float64)
    found = np.percentile(values, [float(name[1:]) for name in PERCENTILES], method="linear").tolist()
    percentiles = dict(zip(PERCENTILES, found, strict=True))
    return Summary(len(samples), float(values.mean()), max=float(values.max()), **percentiles)


def statistic(samples: Sequence[float], name: str) -> float | None:
    """Return "mean", "max" or a percentile such as "p50" or "p99.9" of the samples; None without samples.

    Raises LlmschedError for another name.
    """
    match = _PERCENTILE.fullmatch(name)
    if name not in ("mean", "max") and (match is None or not float(match[1])):
        raise LlmschedError(f"{name!r} is not a statistic; allowed are mean, max and percentiles such as p50 or p99.9")
    if not samples:
        return None
    if match is None:
        return max(samples) if name == "max" else sum(samples) / len(samples)
    ordered = sorted(samples)
    whole, part = divmod(float(match[1]) / 100 * (len(ordered) - 1), 1)
    low, high = ordered[int(whole)], ordered[min(int(whole) + 1, len(ordered) - 1)]
    return low + part * (high - low)


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a request in seconds; None for no target.

    `itl` is the target for `itl_statistic` of the request's ITL samples. `reader_speed` (tokens per second) is not a
    target; it decides which tokens count as late. Raises LlmschedError for an unknown statistic or a speed not above 0.
    """

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    itl_statistic: str = "p99"
    reader_speed: float = READER_SPEED

    def __post_init__(self) -> None:
        statistic((), self.itl_statistic)
        valid = 0 < self.reader_speed < math.inf
        check_range("reader_speed", self.reader_speed, valid, "above 0 tokens per second, and finite")

    def given(self) -> dict[str, float]:
        """Return the targets that are not None, by name."""
        names = ("ttft", "itl", "tpot", "e2e")
        return {name: limit for name in names if (limit := getattr(self, name)) is not None}

    def met_by(self, request: RequestLatency) -> dict[str, bool]:
        """Return for each target whether the request met it. Undefined figures, such as ITL of one token, meet their
        target.
        """
        itl = None if self.itl is None else statistic(request.itl, self.itl_statistic)
        figures = {"ttft": request.ttft, "itl": itl, "tpot": request.tpot, "e2e": request.e2e}
        return {name: (figure := figures[name]) is None or figure <= limit for name, limit in self.given().items()}


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput and SLO attainment of a run.

    `attainment` is the share of requests that met each target; its entry "all" is the share that met every target.
    `missed` counts the served requests that missed each target, `missed_alone` those that missed only that target.
    """

    requests_per_s: float
    attainment: dict[str, float]
    missed: dict[str, int] = field(default_factory=dict)
    missed_alone: dict[str, int] = field(default_factory=dict)


def goodput(slo: Slo, requests: Sequence[RequestLatency], *, failed: int, duration: float) -> Goodput | None:
    """Return the goodput of a run that took `duration` seconds; failed requests count in every denominator.

    Return None without targets, without requests, or if requests met all targets but `duration` is 0.
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
    """Return tokens (or completions) per second from the first arrival to the last, without the first arrival's.

    For n single tokens that is (n - 1) / (last - first). `end` extends the interval to a time until which more tokens
    could have arrived. Return None for an interval of length 0.
    """
    if not arrivals:
        return None
    first, last = min(arrivals).time, max(max(arrivals).time, -math.inf if end is None else end)
    if last <= first:
        return None
    return sum(arrival.tokens for arrival in arrivals if arrival.time > first) / (last - first)
