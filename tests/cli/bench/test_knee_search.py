"""Rates tried by the knee search, and its result."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable

import pytest

from llmsched.cli.bench.knee.knee_search import MAX_ATTEMPTS, Knee, KneeGoal, find_knee
from llmsched.engine.errors import LlmschedError


def search(share_met: Callable[[float], float], low: float, high: float, **goal: float) -> Knee:
    async def attempt(rate: float) -> float:
        return share_met(rate)

    return asyncio.run(find_knee(attempt, KneeGoal(low, high, **goal)))


def rates(knee: Knee) -> list[float]:
    return [attempt.rate for attempt in knee.attempts]


def step(at: float) -> Callable[[float], float]:
    """Return an attainment of 1 up to a rate and of 0.5 above it."""
    return lambda rate: 1.0 if rate <= at else 0.5


def test_always_met_tries_the_upper_bound_itself_and_each_rate_once() -> None:
    knee = search(step(1000), 3, 90)
    assert (knee.verdict, knee.rate, knee.missed) == ("always met", 90, None)
    assert rates(knee) == [3, 6, 12, 24, 48, 90]


def test_never_met_says_so_at_once() -> None:
    knee = search(step(1), 3, 90)
    assert (knee.verdict, knee.rate, knee.missed) == ("never met", None, 3)
    assert rates(knee) == [3]


@pytest.mark.parametrize(("at", "verdict"), [(50, "always met"), (7, "always met"), (6.9, "never met")])
def test_lower_bound_equal_to_the_upper_one(at: float, verdict: str) -> None:
    knee = search(step(at), 7, 7)
    assert (knee.verdict, rates(knee)) == (verdict, [7])


@pytest.mark.parametrize("at", [3, 3.1, 10, 47.9, 48, 88, 89.99])
@pytest.mark.parametrize("tolerance", [0.01, 0.1, 0.5])
def test_the_knee_is_found_within_the_tolerance_and_inside_the_bounds(at: float, tolerance: float) -> None:
    """All rates are within the bounds, and only the two rates of the answer are tried twice."""
    knee = search(step(at), 3, 90, tolerance=tolerance)
    assert knee.verdict == "found"
    assert knee.rate <= at < knee.missed <= knee.rate * (1 + tolerance) * (1 + 1e-12)
    tried = rates(knee)
    assert all(3 <= rate <= 90 for rate in tried)
    assert {rate for rate in tried if tried.count(rate) > 1} == {knee.rate, knee.missed}
    assert max(map(tried.count, tried)) == 2


def test_a_start_that_is_missed_leads_down_to_the_lower_bound_itself() -> None:
    knee = search(step(2), 3, 90, start=40)
    assert (knee.verdict, rates(knee)) == ("never met", [40, 20, 10, 5, 3])
    knee = search(step(6), 3, 90, start=40)
    assert rates(knee)[:4] == [40, 20, 10, 5]
    assert 6 / 1.1 <= knee.rate <= 6


def test_a_start_that_is_met_leads_up() -> None:
    assert rates(search(step(1000), 3, 90, start=40)) == [40, 80, 90]


def test_attainment_at_the_goal_is_enough() -> None:
    assert search(lambda _: 0.9, 1, 4).verdict == "always met"
    assert search(lambda _: 0.95, 1, 4, attainment=0.96).verdict == "never met"


@pytest.mark.parametrize(("chance", "share", "at"), [(4, 0.85, 40), (8, 1.0, 5)])
def test_a_rate_that_fails_or_passes_once_by_chance_is_tried_again(chance: float, share: float, at: float) -> None:
    """The first attempt at `chance` has a share by accident; the repeat has that of a knee at `at`."""
    seen: list[float] = []

    def noisy(rate: float) -> float:
        seen.append(rate)
        return share if rate == chance and seen.count(chance) == 1 else step(at)(rate)

    knee = search(noisy, 1, 100)
    assert 0.875 * at < knee.rate <= at


def test_a_noisy_search_stays_in_bounds_and_ends() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        knee = search(lambda rate, rng=rng: rng.random(), 0.3, 300, tolerance=0.02)  # type: ignore[misc]
        assert len(knee.attempts) <= MAX_ATTEMPTS
        assert all(0.3 <= rate <= 300 for rate in rates(knee))


def test_a_noisy_gradual_decline_is_found_approximately() -> None:
    """Attainment falls from 1 to 0 around 20 requests/s; the true knee, where it is 0.9, lies at 15.8."""
    true = 20 * math.exp(math.log(1 / 0.9 - 1) / 9.3)
    found = []
    for seed in range(50):
        noise = itertools.cycle(random.Random(seed).gauss(0, 0.03) for _ in range(64))

        def noisy(rate: float, noise: itertools.cycle[float] = noise) -> float:
            return min(1.0, 1 / (1 + (rate / 20) ** 9.3) + next(noise))

        found.append(search(noisy, 1, 200).rate)
    errors = sorted(abs(math.log((rate or 1e-9) / true)) for rate in found)
    assert errors[25] < 0.1
    assert errors[-3] < 0.3


@pytest.mark.parametrize(
    "bad", [{"low": 0}, {"low": math.nan}, {"low": 3}, {"high": math.inf}, {"attainment": 0}, {"tolerance": 0}]
)
def test_wrong_goals_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(LlmschedError, match="must "):
        KneeGoal(**{"low": 1, "high": 2, **bad})
