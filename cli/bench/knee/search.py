"""Where to look for the knee: the highest rate at which enough requests still meet their SLOs. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmsched.engine.errors import LlmschedError

#: What a search came to: the knee lies between two rates, beyond the highest allowed one, or below the lowest.
Verdict = Literal["found", "always met", "never met"]

#: Attempts after which a search ends with what it knows; one over a factor of 1,000 takes about 16.
MAX_ATTEMPTS = 32


@dataclass(frozen=True, slots=True)
class Goal:
    """What is looked for, and where. Rates are in requests per second.

    A rate is met if a share of `attainment` of its requests, or more, meets every SLO. The search begins at `start`
    (default: `low`), and ends when the lowest rate that is missed is at most `tolerance` (a share) above the highest
    that is met.

    Raises LlmschedError naming the flag and its range.
    """

    low: float
    high: float
    attainment: float = 0.9
    tolerance: float = 0.1
    start: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.low < math.inf:
            raise LlmschedError(f"--request-rate is {self.low:g}; allowed is above 0 and finite, as the lowest rate")
        if not self.low <= self.high < math.inf:
            raise LlmschedError(
                f"--max-request-rate is {self.high:g}; allowed is the lowest rate, {self.low:g} requests/s, or more, "
                "and finite"
            )
        if self.start is not None and not self.low <= self.start <= self.high:
            raise LlmschedError(
                f"the search starts at {self.start:g} requests/s; allowed is {self.low:g} to {self.high:g}"
            )
        if not 0 < self.attainment <= 1:
            raise LlmschedError(f"--knee-attainment is {self.attainment:g}; allowed is above 0, up to 1 (100%)")
        if not 0.001 <= self.tolerance <= 1:
            raise LlmschedError(f"--knee-tolerance is {self.tolerance:g}; allowed is 0.001 to 1 (100%)")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rate that was tried, and the share of its requests that met every SLO."""

    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Knee:
    """`rate` is the highest that is met below every one that is not (None: even the lowest is missed); `missed` the
    lowest that is not met (None: none was). Rates that were tried twice are judged by their mean.
    """

    verdict: Verdict
    rate: float | None
    missed: float | None
    attempts: tuple[Attempt, ...]


async def find_knee(attempt: Callable[[float], Awaitable[float]], goal: Goal) -> Knee:
    """Try rates by `attempt`, which returns the share of requests that met every SLO, until the knee is known."""
    attempts: list[Attempt] = []
    while len(attempts) < MAX_ATTEMPTS and (rate := next_rate(attempts, goal)) is not None:
        attempts.append(Attempt(rate, await attempt(rate)))
    met, missed = bracket(attempts, goal)
    verdict: Verdict = "never met" if met is None else "always met" if missed is None else "found"
    return Knee(verdict, met, missed, tuple(attempts))


def next_rate(attempts: Sequence[Attempt], goal: Goal) -> float | None:
    """The next rate to try; None when the knee is known.

    Doubles the rate until one is missed, or halves it until one is met (the ends of the allowed range are tried
    themselves), then halves the interval on a logarithmic scale. Each rate is tried once, and both ends of the last
    interval once more: what noise made of one of them is then seen, and the search goes on from there.
    """
    if not attempts:
        return goal.low if goal.start is None else goal.start
    met, missed = bracket(attempts, goal)
    if met is None:
        assert missed is not None
        return None if missed <= goal.low else max(missed / 2, goal.low)
    if missed is None:
        return None if met >= goal.high else min(2 * met, goal.high)
    if missed > met * (1 + goal.tolerance):
        return math.sqrt(met * missed)
    once = [rate for rate in (met, missed) if sum(attempt.rate == rate for attempt in attempts) < 2]
    return once[0] if once else None


def bracket(attempts: Sequence[Attempt], goal: Goal) -> tuple[float | None, float | None]:
    """The lowest rate that is missed, and the highest that is met below it, as (met, missed)."""
    by_rate: dict[float, list[float]] = {}
    for attempt in attempts:
        by_rate.setdefault(attempt.rate, []).append(attempt.attainment)
    is_met = {rate: sum(shares) / len(shares) >= goal.attainment for rate, shares in by_rate.items()}
    missed = min((rate for rate, met in is_met.items() if not met), default=None)
    met = max((rate for rate, met in is_met.items() if met and (missed is None or rate < missed)), default=None)
    return met, missed
