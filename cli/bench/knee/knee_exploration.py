from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from llmsched.cli.bench.knee.knee_search import Knee, KneeGoal, find_knee
from llmsched.cli.figures.experiment import MeasuredRun
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.registry import as_json
from llmsched.cli.load.arrivals import LEAST_RATE
from llmsched.cli.load.load import Load
from llmsched.cli.targets.interface import OpenTarget, RunPlan
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import Progress, silent

#: Default SLOs: this many times the TTFT and TPOT of the idle target.
SLACK = 5.0

#: Maximum number of requests sent to the idle target.
_IDLE_REQUESTS = 8

#: The search starts at _START times the target's throughput, and goes up to at most _HIGHEST times the throughput.
_START, _HIGHEST = 0.5, 4.0

#: The lowest rate tried keeps an otherwise idle target busy for this share of the time.
_LOWEST_LOAD = 0.05

#: Figures are kept for this many rates, the highest that met the goal: the highest of all may miss it when tried again.
_KEPT_RATES = 2

#: JSON report of a run, as `bench --json` prints it.
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KneeLimits:
    """Limits of a knee search; see KneeGoal."""

    highest: float | None  # requests per second
    attainment: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class RateAttempt:
    """Measured run of a knee search, with requests sent at one rate in requests per second."""

    rate: float
    attainment: float  # share of requests that met every SLO
    report: Report
    run: MeasuredRun | None  # None after its tokens were dropped to save memory


@dataclass(frozen=True, slots=True)
class Exploration:
    """Result of a knee search. `idle` and `burst` report on requests sent one by one and all at once, if measured."""

    goal: KneeGoal
    slo: Slo
    knee: Knee
    attempts: tuple[RateAttempt, ...]
    idle: Report | None
    burst: Report | None

    @property
    def at_knee(self) -> RateAttempt | None:
        """Attempt at the knee's rate, preferably the first one that has a `run`; None if there is no knee."""
        tried = [one for one in self.attempts if one.rate == self.knee.rate]
        return next((one for one in tried if one.run is not None), tried[0] if tried else None)


def check(load: Load, limits: KneeLimits) -> None:
    """Raise LlmschedError if the load or the limits do not allow a search."""
    if load.stop_after is not None:
        raise LlmschedError("--find-knee with --duration needs --request-rate, which is then the lowest rate")
    if limits.highest is not None and not LEAST_RATE <= limits.highest < math.inf:
        raise LlmschedError(
            f"--max-request-rate must be finite and at least {LEAST_RATE:g} requests per second, not {limits.highest:g}"
        )
    low = load.request_rate if load.request_rate is not None else limits.highest if limits.highest is not None else 1.0
    KneeGoal(low, low if limits.highest is None else limits.highest, limits.attainment, limits.tolerance)
    load.at_rate(low)


async def explore(opened: OpenTarget, plan: RunPlan, limits: KneeLimits, progress: Progress) -> Exploration:
    """Find the knee of a target. Raises LlmschedError if the target serves no request."""
    load = plan.workload
    seeds = iter(range(load.seed + 1, load.seed + 1_000))
    idle = burst = None
    if not plan.slo.given() or load.request_rate is None:
        progress("idle target", 0, 0)
        idle = await opened.measure(
            load.one_by_one(min(_IDLE_REQUESTS, load.num_requests), seed=next(seeds)), Slo(), silent
        )
    if load.request_rate is None or limits.highest is None:
        progress("all at once", 0, 0)
        burst = await opened.measure(load.head(load.num_requests, seed=next(seeds)), plan.slo, silent)
    slo = plan.slo if plan.slo.given() else _default_slo(idle)
    goal = _goal(load, limits, idle, burst)
    experiment = opened.experiment(load, slo)
    attempts: list[RateAttempt] = []

    async def attempt(rate: float) -> float:
        def told(_: str, done: int, total: int) -> None:
            progress(f"attempt {len(attempts) + 1}, {rate:.3g} requests/s", done, total)

        sent = load.at_rate(rate).with_seed(next(seeds))
        figures = await opened.measure(sent, slo, told)
        attainment = figures.goodput.attainment["all"] if figures.goodput else 0.0
        run = MeasuredRun(opened.experiment(sent, slo), figures)
        attempts.append(RateAttempt(rate, attainment, as_json(*run), run))
        # Figures hold every token of a run: drop those of attempts that are unlikely to be the knee.
        missed = min((one.rate for one in attempts if one.attainment < goal.attainment), default=math.inf)
        kept = sorted({one.rate for one in attempts if one.rate < missed})[-_KEPT_RATES:]
        attempts[:] = [one if one.rate in kept else replace(one, run=None) for one in attempts]
        return attainment

    seen = [None if figures is None else as_json(experiment, figures) for figures in (idle, burst)]
    del idle, burst
    knee = await find_knee(attempt, goal)
    return Exploration(goal, slo, knee, tuple(attempts), *seen)


def _default_slo(idle: Measurement | None) -> Slo:
    assert idle is not None
    if idle.latency.ttft.p50 is None:
        raise LlmschedError(f"no request was served, so the default SLOs are unknown: {_why(idle)}")
    return Slo(
        ttft=SLACK * idle.latency.ttft.p50,
        tpot=None if idle.latency.tpot.p50 is None else SLACK * idle.latency.tpot.p50,
    )


def _goal(load: Load, limits: KneeLimits, idle: Measurement | None, burst: Measurement | None) -> KneeGoal:
    """Return the goal of the search. The figures `idle` and `burst` decide the rates that no flag sets."""
    most = None if burst is None else burst.rates.requests
    if burst is not None and not most:
        raise LlmschedError(f"no request was served, so the rates to try are unknown: {_why(burst)}")
    high = limits.highest if limits.highest is not None else _HIGHEST * (most or 0.0)
    if load.request_rate is not None:
        low = start = load.request_rate
        high = high if limits.highest is not None else max(low, high)
    else:
        assert most is not None
        start = min(_START * most, high)
        busy = idle.latency.e2e.mean if idle is not None else None
        low = min(start, _LOWEST_LOAD / busy) if busy else start
    return KneeGoal(low, high, limits.attainment, limits.tolerance, start)


def _why(figures: Measurement) -> str:
    return ", ".join(f"{reason} ({figures.requests.failure_examples[reason]})" for reason in figures.requests.failures)
