"""The curve: what each token budget gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple

from llmsched.cli.chart import Chart, Series
from llmsched.cli.tune.trials import Trial, TrialHistory, figure_name

_BUDGET = "max_num_batched_tokens, logarithmic"


def curve(history: TrialHistory) -> list[Chart]:
    """ITL, TTFT and what is maximised, over the token budget; nothing where only one was measured."""
    trials = _sweep(history.trials())
    if len(trials) < 2:
        return []
    limits, charts = history.slo.given(), []
    for name in ("itl", "ttft"):
        label = figure_name(name, history.slo)
        points = [(_budget(trial), 1e3 * figure) for trial in trials if (figure := _figure(trial, name)) is not None]
        limit = ((f"SLO of {label}", 1e3 * limits[name]),) if name in limits else ()
        title, series = f"{label} by token budget", (Series(label, points),)
        charts.append(Chart(title, _BUDGET, "ms", series, log_x=True, limits=limit))
    relative = history.relative()
    shares = [(trial, 100 * relative[trial.setting]) for trial in trials if trial.setting in relative]
    missed = [(_budget(trial), share) for trial, share in shares if not trial.feasible]
    drawn = [Series(history.goal, [(_budget(trial), share) for trial, share in shares])]
    drawn += [Series("not feasible", missed, "dots")] if missed else []
    title = f"{history.goal} by token budget"
    unit = "% of the best's" if history.best() else "% of the highest"
    charts.append(Chart(title, _BUDGET, unit, tuple(drawn), log_x=True))
    return charts


def _sweep(trials: Sequence[Trial]) -> list[Trial]:
    """The measured trials that differ in nothing but the token budget, ascending: the largest such group."""
    measured = [trial for trial in trials if trial.completed]
    groups = Counter(astuple(trial.setting)[1:] for trial in measured)
    if not groups:
        return []
    most = groups.most_common(1)[0][0]
    return sorted((trial for trial in measured if astuple(trial.setting)[1:] == most), key=_budget)


def _budget(trial: Trial) -> float:
    return float(trial.setting.max_num_batched_tokens)


def _figure(trial: Trial, name: str) -> float | None:
    """The figure that is held against the SLO; P99 where there is none."""
    p99: float | None = getattr(trial, name).p99
    return trial.held.get(name, p99)
