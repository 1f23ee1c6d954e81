"""Definitions of TTFT, ITL, TPOT, E2E and stalls, for server metrics, bench and tune alike.

All times are in seconds of one clock. A figure for which there is too little data is None, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

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
    """Arrival of `tokens` tokens together, at `time` in seconds. `tokens` is 0 for a chunk without text."""

    time: float
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestLatency:
    """Latencies in seconds of a request that received at least one token."""

    ttft: float
    e2e: float
    tpot: float | None  # time per output token after the first
    #: One sample per token after the first arrival; n tokens that arrive together have 1/n of the gap each.
    itl: tuple[float, ...]
    worst_stall: float | None  # longest gap between two arrivals


def request_latency(start: float, arrivals: Sequence[Arrival]) -> RequestLatency | None:
    """Return the latencies of a request that started at the time `start`, or None if no token arrived."""
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
    """Gap between two arrivals of tokens."""

    seconds: float
    at: float  # time of the arrival before the gap
    tokens_before: int


def worst_stall(arrivals: Sequence[Arrival]) -> Stall | None:
    """Return the longest gap between two arrivals of tokens (the first of equal gaps), or None if there is no gap."""
    carried = [arrival for arrival in arrivals if arrival.tokens > 0]
    totals = accumulate(arrival.tokens for arrival in carried)
    stalls = [
        Stall(new.time - last.time, last.time, before)
        for (last, new), before in zip(pairwise(carried), totals, strict=False)
    ]
    return max(stalls, key=lambda stall: stall.seconds, default=None)


def tpot(ttft: float, e2e: float, output_tokens: int) -> float | None:
    """Return TPOT, the mean time in seconds per output token after the first, or None for fewer than two tokens."""
    return (e2e - ttft) / (output_tokens - 1) if output_tokens > 1 else None


def reading_waits(arrivals: Sequence[Arrival], tokens_per_s: float) -> list[float]:
    """Return how many seconds a reader of `tokens_per_s` tokens per second waited for each late token.

    A token is late if it arrives after the reader has read the previous token. After a wait, reading continues with the
    late token, so one stall makes only one token late.
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


def steady_rate(arrivals: Sequence[Arrival], end: float | None = None) -> float | None:
    """Return the tokens per second between the first and the last arrival, or None if no time passed.

    The tokens of the first arrival are not counted: for n single tokens the rate is (n - 1) / (last - first). `end`, a
    time after the last arrival, extends the interval.
    """
    if not arrivals:
        return None
    first, last = min(arrivals).time, max(max(arrivals).time, -math.inf if end is None else end)
    if last <= first:
        return None
    return sum(arrival.tokens for arrival in arrivals if arrival.time > first) / (last - first)
