"""Which setting is best: the most goodput or throughput among those that meet the SLOs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmsched.cli.tune.knobs import PeakDemand, Setting, describe
from llmsched.cli.tune.ranking import Ranking, rank_settings
from llmsched.cli.tune.trial_runs import FIGURES, TrialRun, percentile, pooled
from llmsched.engine.latency import Slo, Summary
from llmsched.engine.units import three_figures

Goal = Literal["goodput", "throughput"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting gave, its longest runs together: shorter ones are of another load. Times are in seconds, None
    without a sample.

    Rates leave out the ramp and are means over the runs; `spread` is how far these lie from it, as a share. `held` has
    the figure that is held against each SLO, `attainment` the share of requests that met it, and "all". `rounds` counts
    all runs, `longest` is the number of requests of the longest. `reason` says why the setting is not feasible or,
    where `skipped`, why it was not measured.
    """

    setting: Setting
    ttft: Summary
    itl: Summary
    tpot: Summary
    e2e: Summary
    output_tokens_per_s: float | None
    goodput_rps: float | None
    held: Mapping[str, float]
    attainment: Mapping[str, float]
    spread: float
    completed: int
    failed: int
    rounds: int
    longest: int
    reason: str | None
    skipped: bool = False

    @property
    def feasible(self) -> bool:
        return self.reason is None

    def miss(self, slo: Slo) -> float:
        """The worst figure that has a limit, as a multiple of it; 0 if there is none."""
        limits = slo.given()
        # A limit of 0 is missed by everything, and by some more than by others.
        return max((held / max(limits[name], 1e-9) for name, held in self.held.items()), default=0.0)


def judge(setting: Setting, runs: Sequence[TrialRun], slo: Slo) -> Trial:
    """One trial from the runs of a setting. Errors, empty outputs and a missed SLO make it infeasible."""
    rounds = sum(run.requests > 0 for run in runs)
    broken = next((run.problem for run in runs if run.problem is not None), None)
    longest = max((run.requests for run in runs), default=0)
    runs = [run for run in runs if run.requests == longest]
    met = {name: sum(run.met.get(name, 0) for run in runs) for run in runs for name in run.met}
    total = sum(run.completed + run.failed for run in runs)
    figures = {name: pooled([run.samples[name] for run in runs if name in run.samples]) for name in FIGURES}
    trial = Trial(
        setting=setting,
        ttft=figures["ttft"],
        itl=figures["itl"],
        tpot=figures["tpot"],
        e2e=figures["e2e"],
        output_tokens_per_s=_mean([run.tokens_per_s for run in runs]),
        goodput_rps=_mean([run.goodput_rps for run in runs]),
        held=_held(runs, slo),
        attainment={name: count / total for name, count in met.items()} if total else {},
        spread=_spread([run.tokens_per_s for run in runs]),
        completed=sum(run.completed for run in runs),
        failed=sum(run.failed for run in runs),
        rounds=rounds,
        longest=longest,
        reason=None,
    )
    return replace(trial, reason=broken or _missed(trial, slo))


class TrialHistory:
    """All runs so far, by setting, in the order in which settings are to be preferred where they are equal.

    `exact`: the same run always gives the same, as on a virtual clock.
    """

    def __init__(self, slo: Slo, goal: Goal, *, exact: bool = False) -> None:
        self.slo = slo
        self.exact = exact
        self.goal: Goal = goal if slo.given() else "throughput"
        self.runs: dict[Setting, list[TrialRun]] = {}
        self.skipped: dict[Setting, str] = {}

    def consider(self, settings: Sequence[Setting]) -> None:
        """Settings that come next; those known already keep their place."""
        for setting in settings:
            self.runs.setdefault(setting, [])

    def add(self, run: TrialRun) -> None:
        self.runs.setdefault(run.setting, []).append(run)

    def forget(self, round_index: int) -> None:
        """Take out the runs of a round that tell nothing of the settings, but not that one of them did not work."""
        for setting, runs in self.runs.items():
            self.runs[setting] = [run for run in runs if run.round_index != round_index or run.problem]

    def trial(self, setting: Setting) -> Trial:
        trial = judge(setting, self.runs.get(setting, ()), self.slo)
        if setting in self.skipped and not self.runs.get(setting):
            return replace(trial, reason=self.skipped[setting], skipped=True)
        return (
            trial if self.runs.get(setting) else replace(trial, reason="not measured: the time was over", skipped=True)
        )

    def trials(self) -> list[Trial]:
        """All settings considered, in order of preference."""
        return [self.trial(setting) for setting in self.runs]

    def score(self, run: TrialRun) -> float | None:
        """What is to be maximised, of one run; None where it has none."""
        return None if run.problem else run.goodput_rps if self.goal == "goodput" else run.tokens_per_s

    def ranking(self) -> Ranking:
        return rank_settings(self._all(), self.score, exact=self.exact)

    def throughput(self) -> Ranking:
        """The standing by output tokens per second, whatever is to be maximised."""
        return rank_settings(self._all(), lambda run: run.throughput, exact=self.exact)

    def _all(self) -> list[TrialRun]:
        return [run for runs in self.runs.values() for run in runs]

    def demand(self) -> PeakDemand | None:
        """The most that any run asked of the engine; None if no run could tell."""
        known = [run.demand for run in self._all() if run.demand is not None]
        if not known:
            return None
        return PeakDemand(
            max(demand.running for demand in known),
            max(demand.kv_share for demand in known),
            any(demand.preempted for demand in known),
        )

    def contenders(self) -> list[Trial]:
        """The feasible trials of those measured longest: one that went out early, on a short run, is none."""
        feasible = [trial for trial in self.trials() if trial.feasible]
        longest = max((trial.longest for trial in feasible), default=0)
        return [trial for trial in feasible if trial.longest == longest]

    def best(self) -> Trial | None:
        """The contender with the highest score, the first of those equal within noise; None if none is feasible."""
        contenders = {trial.setting: trial for trial in self.contenders()}
        return contenders[self.ranking().best(list(contenders))] if contenders else None

    def leader(self) -> Trial | None:
        """Where the search goes on from: the highest score whatever the noise, else the nearest miss."""
        contenders = {trial.setting: trial for trial in self.contenders()}
        return contenders[self.ranking().ranked(list(contenders))[0]] if contenders else self.nearest_miss()

    def relative(self) -> dict[Setting, float]:
        """The score of each setting as a share of the best's, what rounds have in common taken out; where no setting is
        feasible, of the highest.

        Rates of runs of different length and time cannot be compared with each other; these can.
        """
        table, best = self.ranking(), self.best()
        ranked = [best.setting] if best else table.ranked(list(table.effects))
        if not ranked or not math.isfinite(table.effects.get(ranked[0], -math.inf)):
            return {}
        return {setting: table.share(setting, ranked[0]) for setting in table.effects}

    def missed(self) -> list[Trial]:
        """Trials that worked but missed an SLO, the nearest first."""
        worked = [setting for setting, runs in self.runs.items() if runs and not any(run.problem for run in runs)]
        missed = [trial for trial in map(self.trial, worked) if not trial.feasible]
        return sorted(missed, key=lambda trial: trial.miss(self.slo))

    def nearest_miss(self) -> Trial | None:
        """The one that missed an SLO by the least, of those measured longest; None if there is none."""
        missed = self.missed()
        longest = max((trial.longest for trial in missed), default=0)
        return next((trial for trial in missed if trial.longest == longest), None)


def explain(history: TrialHistory) -> str:
    """The choice in a sentence."""
    trials, best = [trial for trial in history.trials() if not trial.skipped], history.best()
    settings = [trial.setting for trial in trials]
    if best is None:
        return _none_feasible(trials, history.nearest_miss())
    good = [trial for trial in trials if trial.feasible]
    chosen = f"{describe(best.setting, settings)}: {rate_in_words(best, history.goal)}"
    if len(good) == 1:
        met = "meets the SLOs" if history.slo.given() else "works (no SLO was given)"
        tried = f"the only one of {len(trials)} settings that" if len(trials) > 1 else "the only setting tried, which"
        return f"{chosen}, by {tried} {met}{_faster(best, history, settings)}"
    met = "meet the SLOs" if history.slo.given() else "work (no SLO was given)"
    of = f"of the {len(good)} of {len(trials)} settings that {met}"
    return f"{chosen} {_rank(best, good, history, settings)} {of}{_faster(best, history, settings)}"


def _none_feasible(trials: Sequence[Trial], nearest: Trial | None) -> str:
    tried = f"none of the {len(trials)} settings tried" if len(trials) > 1 else "not even the only setting tried"
    if nearest is None:
        return f"{tried} works; the reason stands with each"
    name = describe(nearest.setting, [trial.setting for trial in trials])
    return f"{tried} is feasible; nearest is {name}: {nearest.reason}; relax the SLOs or lower the load"


def rate_in_words(trial: Trial, goal: Goal) -> str:
    """What is maximised."""
    tokens = f"{trial.output_tokens_per_s or 0.0:.1f} tokens/s"
    return f"{trial.goodput_rps or 0.0:.3g} good requests/s ({tokens})" if goal == "goodput" else tokens


def _rank(best: Trial, good: Sequence[Trial], history: TrialHistory, settings: list[Setting]) -> str:
    table = history.ranking()
    rivals = [trial.setting for trial in good if trial.longest == best.longest]
    ahead = max(rivals, key=lambda setting: table.share(setting, best.setting))
    if ahead != best.setting:
        noise = f"{table.noise(ahead, best.setting):.0%}"
        within = f"within {noise}" if history.exact else f"within the noise ({noise})"
        return f"is {within} of the most ({describe(ahead, settings)})"
    if any(table.share(trial.setting, best.setting) > 1 for trial in good):
        return f"is the most of the {len(rivals)} that were run in full, and so"
    return "is the most"


def _faster(best: Trial, history: TrialHistory, settings: list[Setting]) -> str:
    """What was faster in runs of the same rounds, but too late."""
    table, late = history.throughput(), history.missed()
    shares = {trial.setting: table.share(trial.setting, best.setting) for trial in late}
    fastest = max(late, key=lambda trial: shares[trial.setting], default=None)
    if fastest is None or shares[fastest.setting] <= 1 + table.noise(fastest.setting, best.setting):
        return ""
    more = f"{shares[fastest.setting] - 1:.0%} more tokens/s"
    return f"; {describe(fastest.setting, settings)} gave {more}, but its {fastest.reason}"


def held_statistic(name: str, slo: Slo) -> str:
    """Which statistic of all samples is held against an SLO: P99, unless another was asked for."""
    return slo.itl_statistic if name == "itl" else "p99"


def figure_name(name: str, slo: Slo) -> str:
    """P99 TTFT, mean ITL and the like."""
    which = held_statistic(name, slo)
    return f"{which.upper() if which.startswith('p') else which} {name.upper()}"


def _held(runs: Sequence[TrialRun], slo: Slo) -> dict[str, float]:
    figures = {
        name: percentile([run.samples[name] for run in runs if name in run.samples], held_statistic(name, slo))
        for name in slo.given()
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _missed(trial: Trial, slo: Slo) -> str | None:
    missed = [
        f"{figure_name(name, slo)} {three_figures(figure * 1e3)} ms is above {limit * 1e3:g} ms"
        for name, figure in trial.held.items()
        if figure > (limit := slo.given()[name])
    ]
    return ", ".join(missed) or None


def _mean(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


def _spread(rates: Sequence[float | None]) -> float:
    known = [rate for rate in rates if rate]
    return (max(known) - min(known)) / 2 / (sum(known) / len(known)) if known else 0.0
