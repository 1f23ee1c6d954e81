"""Search for the knee: the highest request rate at which enough requests still meet their SLOs."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmsched.engine.errors import LlmschedError

#: Outcome of a search: the knee lies between two rates, above the highest allowed rate, or below the lowest.
Verdict = Literal["found", "always met", "never met"]

#: Maximum number of attempts; searching a range of 1 to 1,000 takes about 16.
MAX_ATTEMPTS = 32
#: Defaults of --knee-attainment and --knee-tolerance (shares).
ATTAINMENT, TOLERANCE = 0.9, 0.1


@dataclass(frozen=True, slots=True)
class KneeGoal:
    """Goal and range of a knee search. Raises LlmschedError for a value out of range.

    The search starts at `start` (default: `low`), and multiplies or divides the rate by `factor` until one rate has met
    the goal and another has missed it. It then narrows the interval between these two rates.
    """

    low: float  # requests per second
    high: float  # requests per second
    attainment: float = ATTAINMENT  # share of requests that must meet every SLO
    tolerance: float = TOLERANCE  # width at which the interval is narrow enough, as a share of the lower rate
    start: float | None = None
    factor: float = 2.0
    repeat: bool = True  # try both ends of the last interval once more

    def __post_init__(self) -> None:
        if not 0 < self.low < math.inf:
            raise LlmschedError(f"--request-rate, the lowest rate, must be above 0 and finite, not {self.low:g}")
        if not self.low <= self.high < math.inf:
            raise LlmschedError(
                f"--max-request-rate must be finite and at least the lowest rate, {self.low:g} requests/s, "
                f"not {self.high:g}"
            )
        if self.start is not None and not self.low <= self.start <= self.high:
            raise LlmschedError(
                f"the search must start at {self.low:g} to {self.high:g} requests/s, not {self.start:g}"
            )
        if not 0 < self.attainment <= 1:
            raise LlmschedError(f"--knee-attainment must be above 0 and at most 1 (100%), not {self.attainment:g}")
        if not 0.001 <= self.tolerance <= 1:
            raise LlmschedError(f"--knee-tolerance must be 0.001 to 1 (100%), not {self.tolerance:g}")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt at a rate in requests per second, with the share of requests that met every SLO."""

    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Knee:
    """Result of a search. Rates are in requests per second."""

    verdict: Verdict
    rate: float | None  # the highest rate below `missed` that met the goal
    missed: float | None  # the lowest rate that missed the goal
    attempts: tuple[Attempt, ...]


async def find_knee(attempt: Callable[[float], Awaitable[float]], goal: KneeGoal) -> Knee:
    """Find the knee. `attempt` takes a request rate and returns the share of requests that met every SLO."""
    attempts: list[Attempt] = []
    while len(attempts) < MAX_ATTEMPTS and (rate := next_rate(attempts, goal)) is not None:
        attempts.append(Attempt(rate, await attempt(rate)))
    met, missed = bracket(attempts, goal)
    verdict: Verdict = "never met" if met is None else "always met" if missed is None else "found"
    return Knee(verdict, met, missed, tuple(attempts))


def next_rate(attempts: Sequence[Attempt], goal: KneeGoal) -> float | None:
    """Return the next rate to try in requests per second; None when the search is over."""
    if not attempts:
        return goal.low if goal.start is None else goal.start
    met, missed = bracket(attempts, goal)
    if met is None:
        assert missed is not None
        return None if missed <= goal.low else max(missed / goal.factor, goal.low)
    if missed is None:
        return None if met >= goal.high else min(goal.factor * met, goal.high)
    if missed > met * (1 + goal.tolerance):
        return math.sqrt(met * missed)
    if not goal.repeat:
        return None
    once = [rate for rate in (met, missed) if sum(attempt.rate == rate for attempt in attempts) < 2]
    return once[0] if once else None


def bracket(attempts: Sequence[Attempt], goal: KneeGoal) -> tuple[float | None, float | None]:
    """Return the highest rate that met the goal and the lowest rate that missed it.

    A rate that met the goal does not count if a lower rate missed it.
    """
    by_rate: dict[float, list[float]] = {}
    for attempt in attempts:
        by_rate.setdefault(attempt.rate, []).append(attempt.attainment)
    is_met = {rate: sum(shares) / len(shares) >= goal.attainment for rate, shares in by_rate.items()}
    missed = min((rate for rate, met in is_met.items() if not met), default=None)
    met = max((rate for rate, met in is_met.items() if met and (missed is None or rate < missed)), default=None)
    return met, missed
