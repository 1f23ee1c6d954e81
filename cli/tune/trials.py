"""Trials: the pooled runs of each setting, which show whether the setting is feasible and which setting is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmsched.cli.tune.knobs import Setting, distance
from llmsched.cli.tune.ranking import Ranking
from llmsched.cli.tune.trial_runs import FIGURES, TrialRun, pooled, pooled_statistic
from llmsched.engine.goodput import Slo
from llmsched.engine.percentiles import Summary
from llmsched.engine.units import three_figures

Goal = Literal["goodput", "throughput"]

#: Margins to the SLOs (1 - figure / SLO, of the SLO that is nearest) count as equal if they differ by at most this.
MARGIN_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of one setting, pooled over its longest runs (those with the most requests).

    `latencies` maps each name in FIGURES to a summary in seconds. Rates exclude the ramp-up and are means over the
    runs. `spread` is half the range of the token rates, divided by their mean. `held` maps the name of each SLO to the
    figure in seconds that is compared with the SLO. `attainment` maps the name of each SLO, and "all", to the share of
    requests that met it. `miss` is the largest ratio of a figure to its SLO, or 0. `rounds` counts all runs of the
    setting. `longest` is the number of requests in a longest run. `reason` says why the setting is infeasible or, if
    `skipped`, why it was not measured.
    """

    setting: Setting
    latencies: Mapping[str, Summary]
    output_tokens_per_s: float | None
    requests_per_s: float | None
    goodput_rps: float | None
    held: Mapping[str, float]
    attainment: Mapping[str, float]
    spread: float
    completed: int
    failed: int
    rounds: int
    longest: int
    miss: float
    reason: str | None
    skipped: bool = False

    @property
    def feasible(self) -> bool:
        return self.reason is None


def judge(setting: Setting, runs: Sequence[TrialRun], slo: Slo) -> Trial:
    """Pool the runs of a setting into a trial. Failed requests, no output or a missed SLO make it infeasible."""
    rounds = sum(run.requests > 0 for run in runs)
    broken = next((run.problem for run in runs if run.problem is not None), None)
    longest = max((run.requests for run in runs), default=0)
    runs = [run for run in runs if run.requests == longest]
    met = {name: sum(run.met.get(name, 0) for run in runs) for run in runs for name in run.met}
    total = sum(run.completed + run.failed for run in runs)
    samples = {name: [run.samples[name] for run in runs if name in run.samples] for name in FIGURES}
    limits = slo.given()
    figures = {name: pooled_statistic(samples[name], held_statistic(name, slo)) for name in limits}
    held = {name: figure for name, figure in figures.items() if figure is not None}
    missed = [
        f"{figure_name(name, slo)} {three_figures(figure * 1e3)} ms is above {limits[name] * 1e3:g} ms"
        for name, figure in held.items()
        if figure > limits[name]
    ]
    rates = [run.tokens_per_s for run in runs if run.tokens_per_s]
    return Trial(
        setting=setting,
        latencies={name: pooled(parts) for name, parts in samples.items()},
        output_tokens_per_s=_mean([run.tokens_per_s for run in runs]),
        requests_per_s=_mean([run.requests_per_s for run in runs]),
        goodput_rps=_mean([run.goodput_rps for run in runs]),
        held=held,
        attainment={name: count / total for name, count in met.items()} if total else {},
        spread=(max(rates) - min(rates)) / 2 / (sum(rates) / len(rates)) if rates else 0.0,
        completed=sum(run.completed for run in runs),
        failed=sum(run.failed for run in runs),
        rounds=rounds,
        longest=longest,
        # Every figure misses an SLO of 0; the floor keeps those misses comparable.
        miss=max((figure / max(limits[name], 1e-9) for name, figure in held.items()), default=0.0),
        reason=broken or ", ".join(missed) or None,
    )


def _mean(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


def held_statistic(name: str, slo: Slo) -> str:
    """Return the statistic that is compared with an SLO: "p99" or, for ITL, the statistic that the user chose."""
    return slo.itl_statistic if name == "itl" else "p99"


def figure_name(name: str, slo: Slo) -> str:
    """Return the name of the figure that is compared with an SLO, such as "P99 TTFT" or "mean ITL"."""
    which = held_statistic(name, slo)
    return f"{which.upper() if which.startswith('p') else which} {name.upper()}"


class TrialHistory:
    """Record of all runs of a search by setting. The settings are in order of preference, which decides ties.

    `exact` means that a repeated run has the same figures, as on a virtual clock. If `default`, the setting without a
    profile, is known, ties are decided by how near a setting is to it. `chosen` is the best setting if it was chosen by
    more than these runs.
    """

    def __init__(self, slo: Slo, goal: Goal, *, exact: bool = False, default: Setting | None = None) -> None:
        self.slo = slo
        self.default = default
        self.chosen: Setting | None = None
        self.exact = exact
        self.goal: Goal = goal if slo.given() else "throughput"
        self.runs: dict[Setting, list[TrialRun]] = {}
        self.skipped: dict[Setting, str] = {}

    def consider(self, settings: Sequence[Setting]) -> None:
        """Append settings to the order of preference. A setting that is already in the order keeps its position."""
        for setting in settings:
            self.runs.setdefault(setting, [])

    def add(self, run: TrialRun) -> None:
        self.runs.setdefault(run.setting, []).append(run)

    def forget(self, round_index: int) -> None:
        """Remove the runs of a round, except those that failed."""
        for setting, runs in self.runs.items():
            self.runs[setting] = [run for run in runs if run.round_index != round_index or run.problem]

    @property
    def all_runs(self) -> list[TrialRun]:
        return [run for runs in self.runs.values() for run in runs]

    def worked(self) -> list[Setting]:
        """Return the settings with at least one run that did not fail."""
        return [setting for setting, runs in self.runs.items() if any(run.problem is None for run in runs)]

    def trial(self, setting: Setting) -> Trial:
        runs = self.runs.get(setting, ())
        trial = judge(setting, runs, self.slo)
        if runs:
            return trial
        return replace(trial, reason=self.skipped.get(setting, "not measured: out of time"), skipped=True)

    def trials(self) -> list[Trial]:
        """Return the trials of all settings considered, in order of preference."""
        return [self.trial(setting) for setting in self.runs]

    def score(self, run: TrialRun) -> float | None:
        """Return the rate that the search maximises, taken from a run; None if the run failed or has no rate."""
        return None if run.problem else run.goodput_rps if self.goal == "goodput" else run.tokens_per_s

    def ranking(self) -> Ranking:
        return Ranking(self.all_runs, self.score, exact=self.exact)

    def throughput_ranking(self) -> Ranking:
        """Rank the settings by output tokens per second, even if the search maximises goodput."""
        return Ranking(self.all_runs, lambda run: run.throughput, exact=self.exact)

    def contenders(self) -> dict[Setting, Trial]:
        """Return the feasible trials with the longest runs. A setting with only shorter runs has left the race."""
        feasible = [trial for trial in self.trials() if trial.feasible]
        longest = max((trial.longest for trial in feasible), default=0)
        return {trial.setting: trial for trial in feasible if trial.longest == longest}

    def best(self) -> Trial | None:
        """Return the preferred feasible trial among those whose scores are within the noise of the highest."""
        if self.chosen is not None:
            return self.trial(self.chosen)
        contenders = self.contenders()
        level = self.ranking().level(list(contenders)) if contenders else []
        return self.preferred([contenders[setting] for setting in level]) if level else None

    def preferred(self, equals: Sequence[Trial]) -> Trial:
        """Return the trial with the largest margin to the SLOs; of about equal margins, the nearest to the default."""
        least = min(trial.miss for trial in equals)
        near = [trial for trial in equals if trial.miss <= least + MARGIN_TOLERANCE]
        default = self.default
        return near[0] if default is None else min(near, key=lambda trial: distance(trial.setting, default))

    def leader(self) -> Trial | None:
        """Return the feasible trial with the highest score, ignoring noise, or else the `nearest_miss`."""
        contenders = self.contenders()
        return contenders[self.ranking().ranked(list(contenders))[0]] if contenders else self.nearest_miss()

    def relative(self) -> dict[Setting, float]:
        """Return the score of each setting divided by the score of the best, or by the highest if none is feasible.

        Unlike rates, these ratios can be compared between settings that ran in different rounds or had shorter runs.
        """
        table, best = self.ranking(), self.best()
        ranked = [best.setting] if best else table.ranked(list(table.effects))
        if not ranked or not math.isfinite(table.effects.get(ranked[0], -math.inf)):
            return {}
        return {setting: table.share(setting, ranked[0]) for setting in table.effects}

    def missed(self) -> list[Trial]:
        """Return the trials that worked but missed an SLO, ordered by `miss`, smallest first."""
        worked = [setting for setting, runs in self.runs.items() if runs and not any(run.problem for run in runs)]
        missed = [trial for trial in map(self.trial, worked) if not trial.feasible]
        return sorted(missed, key=lambda trial: trial.miss)

    def nearest_miss(self) -> Trial | None:
        """Return the trial with the smallest `miss` among the longest runs that missed an SLO, if there is one."""
        missed = self.missed()
        longest = max((trial.longest for trial in missed), default=0)
        return next((trial for trial in missed if trial.longest == longest), None)
