"""The search of the knee on a target: what it does when idle, what at most, and then rate after rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmsched.cli.bench.knee.search import Goal, Knee, find_knee
from llmsched.cli.bench.output.report import as_json
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.arrivals import LEAST_RATE
from llmsched.cli.load.load import Load
from llmsched.cli.targets.interface import OpenTarget, RunPlan
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress, silent

#: Without an SLO: TTFT and TPOT may take this many times what they take when the target is idle.
SLACK = 5.0

#: Requests, at most, that tell what an idle target does.
_IDLE_REQUESTS = 8

#: The search begins at this share of what the target does at most, and ends at this multiple of it.
_START, _HIGHEST = 0.5, 4.0

#: The lowest rate that is tried: at which the target is busy for this share of the time.
_LOWEST_LOAD = 0.05

#: The highest rates that are met whose figures are kept in full: the highest one may prove to be missed.
_KEPT_RATES = 2

#: What `bench --json` has of a run.
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wish:
    """What to look for: the highest rate to try in requests per second (None: see --help), and as in `Goal`."""

    highest: float | None
    attainment: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Point:
    """A rate that was tried, and what `bench --json` has of the run there; `figures` where they are kept."""

    rate: float
    attainment: float
    report: Report
    figures: Measurement | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to. `idle` and `burst` are reports on the target when idle and when all requests come at once;
    None where they were not needed.
    """

    goal: Goal
    slo: Slo
    knee: Knee
    points: tuple[Point, ...]
    idle: Report | None
    burst: Report | None

    @property
    def at_knee(self) -> Point | None:
        """The first attempt at the knee, of those whose figures are kept if there are any."""
        tried = [point for point in self.points if point.rate == self.knee.rate]
        return next((point for point in tried if point.figures is not None), tried[0] if tried else None)


def check(load: Load, wish: Wish) -> None:
    """Raise LlmschedError for what cannot be searched, before any work is done."""
    if load.stop_after is not None:
        raise LlmschedError("--find-knee with --duration needs --request-rate, which is then the lowest rate")
    if wish.highest is not None and not LEAST_RATE <= wish.highest < math.inf:
        raise LlmschedError(
            f"--max-request-rate is {wish.highest:g}; allowed is {LEAST_RATE:g} or more requests per second, and finite"
        )
    low = load.request_rate if load.request_rate is not None else wish.highest if wish.highest is not None else 1.0
    Goal(low, low if wish.highest is None else wish.highest, wish.attainment, wish.tolerance)
    load.at_rate(low)


async def explore(opened: OpenTarget, plan: RunPlan, wish: Wish, progress: Progress) -> Found:
    """Find the knee of a target under the plan's load, which `check` has passed. Every attempt has its own requests.

    Raises LlmschedError when the target serves nothing that could say where to begin.
    """
    load = plan.workload
    seeds = iter(range(load.seed + 1, load.seed + 1_000))
    idle = burst = None
    if not plan.slo.given() or load.request_rate is None:
        progress("idle target", 0, 0)
        idle = await opened.measure(
            load.one_by_one(min(_IDLE_REQUESTS, load.num_requests), seed=next(seeds)), Slo(), silent
        )
    if load.request_rate is None or wish.highest is None:
        progress("all at once", 0, 0)
        burst = await opened.measure(load.head(load.num_requests, seed=next(seeds)), plan.slo, silent)
    slo = plan.slo if plan.slo.given() else _default_slo(idle)
    goal = _goal(load, wish, idle, burst)
    experiment = opened.experiment(load, slo)
    points: list[Point] = []

    async def attempt(rate: float) -> float:

        def told(_: str, done: int, total: int) -> None:
            progress(f"attempt {len(points) + 1}, {rate:.3g} requests/s", done, total)

        figures = await opened.measure(load.at_rate(rate).with_seed(next(seeds)), slo, told)
        attainment = figures.goodput.attainment["all"] if figures.goodput else 0.0
        points.append(Point(rate, attainment, as_json(experiment, figures), figures))
        points[:] = _lightened(points, goal)
        return attainment

    seen = [None if figures is None else as_json(experiment, figures) for figures in (idle, burst)]
    del idle, burst
    knee = await find_knee(attempt, goal)
    return Found(goal, slo, knee, tuple(points), *seen)


def _lightened(points: Sequence[Point], goal: Goal) -> list[Point]:
    """The same without figures that the knee will hardly have: those hold every token of a run, and there are many."""
    missed = min((point.rate for point in points if point.attainment < goal.attainment), default=math.inf)
    kept = sorted({point.rate for point in points if point.rate < missed})[-_KEPT_RATES:]
    return [point if point.rate in kept else replace(point, figures=None) for point in points]


def _default_slo(idle: Measurement | None) -> Slo:
    assert idle is not None
    if idle.latency.ttft.p50 is None:
        raise LlmschedError(f"no request was served, so there is no latency to go by: {_why(idle)}")
    return Slo(
        ttft=SLACK * idle.latency.ttft.p50,
        tpot=None if idle.latency.tpot.p50 is None else SLACK * idle.latency.tpot.p50,
    )


def _goal(load: Load, wish: Wish, idle: Measurement | None, burst: Measurement | None) -> Goal:
    """The range to search: as asked for, else from what the target does when idle and at most."""
    most = None if burst is None else burst.rates.requests
    if burst is not None and not most:
        raise LlmschedError(f"no request was served, so it is not known which rates to try: {_why(burst)}")
    high = wish.highest if wish.highest is not None else _HIGHEST * (most or 0.0)
    if load.request_rate is not None:
        low = start = load.request_rate
        high = high if wish.highest is not None else max(low, high)
    else:
        assert most is not None
        start = min(_START * most, high)
        busy = idle.latency.e2e.mean if idle is not None else None
        low = min(start, _LOWEST_LOAD / busy) if busy else start
    return Goal(low, high, wish.attainment, wish.tolerance, start)


def _why(figures: Measurement) -> str:
    return ", ".join(f"{reason} ({figures.requests.failure_examples[reason]})" for reason in figures.requests.failures)
