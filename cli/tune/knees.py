"""Knees of settings: the highest request rate at which each setting still meets the SLOs.

At a rate far below the knees, all settings meet the SLOs and look alike. Therefore tune compares settings at the knee
of the default, and then raises the rate until every setting misses an SLO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmsched.cli.bench.knee.knee_search import KneeGoal, find_knee
from llmsched.cli.load.load import Load
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.cli.tune.trial_runs import TrialRun, TrialRunner, attempt
from llmsched.cli.tune.trials import Trial, judge
from llmsched.engine.errors import ConfigError
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import Progress, silent

#: A setting meets the SLOs at a rate if its figures do (see `Trial.held`) and this share of requests meets every SLO.
ATTAINMENT = 0.95
#: Shares by which two knees must differ to count as different, if they are simulated and if they are measured.
SIMULATED_TOLERANCE, MEASURED_TOLERANCE = 0.04, 0.15
#: A run at a rate lasts at least this many times the SLO on TTFT or E2E, so that a growing backlog shows.
_BACKLOG = 5.0
#: A search ends if the SLOs are met even at this many times the rate at which it started.
_RANGE = 256.0


def meets(trial: Trial) -> bool:
    return trial.feasible and trial.attainment.get("all", 1.0) >= ATTAINMENT


@dataclass(frozen=True, slots=True)
class KneeBounds:
    """Bounds of a setting's knee in requests per second; None if unknown."""

    met: float | None = None  # highest rate at which the setting met the SLOs
    missed: float | None = None  # lowest rate at which the setting missed an SLO


@dataclass(frozen=True, slots=True)
class RateRow:
    """Results of the default and of the chosen setting at one request rate."""

    label: str
    rate: float | None  # None for a given load that has no single rate
    default: Trial
    best: Trial
    predicted: bool  # by a cost model


@dataclass(slots=True)
class RateReport:
    """Request rates of a search, in requests per second."""

    given: float | None = None  # rate of the given load; inf: all requests at once
    compared: float | None = None  # rate at which the settings were compared; None: under the given load
    default: KneeBounds = field(default_factory=KneeBounds)
    best: KneeBounds = field(default_factory=KneeBounds)
    light: bool = False  # True if the default met the SLOs at every rate that was tried
    rows: list[RateRow] = field(default_factory=list)


@dataclass(slots=True)
class KneeFinder:
    """Finder of knees. It runs each setting at most once per request rate. A rate of None means the given load."""

    runner: TrialRunner
    load: Load
    slo: Slo
    least: int  # requests of a run, unless `requests` needs more
    longest: float  # seconds of a run
    tolerance: float  # share by which two knees may differ and still count as equal
    progress: Progress = silent
    predicted: bool = False  # a cost model predicts the runs
    runs: dict[tuple[Setting, float | None], TrialRun] = field(default_factory=dict)
    trials: dict[tuple[Setting, float | None], Trial] = field(default_factory=dict)
    out_of_time: bool = False

    def requests(self, rate: float | None) -> int:
        """Return the number of requests that a run at this rate sends.

        A load with a duration sends the requests that are due in that duration. Other loads send `least` requests, or
        more if a backlog must grow longer before it exceeds the SLO on TTFT or E2E.
        """
        if rate is None:
            return self.least
        if self.load.duration is not None:
            return self.load.at_rate(rate).num_requests
        limits = [limit for name, limit in self.slo.given().items() if name in ("ttft", "e2e")]
        limit = min(limits, default=0.0) if isinstance(self.load, SyntheticLoad) else 0.0
        seconds = min(_BACKLOG * limit, self.longest) if limit <= self.longest else 0.0
        return max(self.least, math.ceil(rate * seconds))

    async def trial(self, setting: Setting, rate: float | None) -> Trial:
        """Return the result of a setting at a rate. If there is none yet, run the setting.

        Raises OutOfTimeError if the time limit ends the run, or if the cost model predicts no run.
        """
        if (known := self.trials.get((setting, rate))) is None:
            requests = self.requests(rate)
            run = self.runner.predict([setting], requests, rate).get(setting) if self.predicted else None
            if not self.predicted:
                run = await attempt(self.runner, setting, requests, 0, rate)
            if run is None:
                raise OutOfTimeError
            self.runs[setting, rate] = run
            known = self.trials[setting, rate] = judge(setting, [run], self.slo)
        return known

    async def climb(self, settings: Sequence[Setting], low: float, start: float, factor: float = 2.0) -> list[Setting]:
        """Find the highest rate at which any of the settings meets the SLOs, and return the settings that do.

        The search starts at `start`, and multiplies or divides the rate by `factor`, but not below `low`, until the
        SLOs have been met at one rate and missed at another. It then narrows the interval between these two rates.
        Return [] if no setting met the SLOs at any rate.
        """
        alive, best = list(settings), list[Setting]()

        async def met_at(rate: float) -> float:
            nonlocal alive, best
            self.progress(f"knee: {rate:.3g} requests/s", 0, 0)
            met = [setting for setting in alive if meets(await self.trial(setting, rate))]
            if met:
                alive = best = met
            return float(bool(met))

        start = max(start, low)
        goal = KneeGoal(low, _RANGE * start, ATTAINMENT, self.tolerance, start, factor, repeat=False)
        try:
            await find_knee(met_at, goal)
        except OutOfTimeError:
            self.out_of_time = True
        return best

    def bounds(self, setting: Setting) -> KneeBounds:
        """Return the bounds of a setting's knee that follow from the runs so far."""
        met = {rate: meets(one) for (each, rate), one in self.trials.items() if each == setting and rate is not None}
        missed = min((rate for rate, is_met in met.items() if not is_met), default=None)
        known = [rate for rate, is_met in met.items() if is_met and (missed is None or rate < missed)]
        return KneeBounds(max(known, default=None), missed)


def scalable(load: Load) -> bool:
    """Return True if the requests of the load can be sent at another rate."""
    try:
        load.at_rate(1.0)
    except ConfigError:
        return False
    return True


def given_rate(load: Load, served: Trial) -> float | None:
    """Return the mean request rate of a load: inf if it sends all requests at once, None if it has no single rate.

    For a closed loop, return the rate of `served`, the default's result under this load.
    """
    if not scalable(load):
        return None
    if load.closed:
        return served.requests_per_s
    if load.asked_rate is not None:
        return load.asked_rate
    last = load.last_offset
    return (load.num_requests - 1) / last if last > 0 else math.inf
