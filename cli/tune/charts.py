"""The curve: what each token budget gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple

from llmsched.cli.chart import Chart, Series
from llmsched.cli.tune.objective import Evidence, Trial, figure_name

_BUDGET = "max_num_batched_tokens, logarithmic"


def curve(evidence: Evidence) -> list[Chart]:
    """ITL, TTFT and what is maximised, over the token budget; nothing where only one was measured."""
    trials = _sweep(evidence.trials())
    if len(trials) < 2:
        return []
    limits, goal = evidence.slo.given(), "good requests/s" if evidence.goal == "goodput" else "output tokens/s"
    charts = []
    for name in ("itl", "ttft"):
        points = [(_budget(trial), 1e3 * p99) for trial in trials if (p99 := getattr(trial, name).p99) is not None]
        limit = ((f"SLO of {figure_name(name, evidence.slo)}", 1e3 * limits[name]),) if name in limits else ()
        title = f"P99 {name.upper()} by token budget"
        charts.append(Chart(title, _BUDGET, "ms", (Series(f"P99 {name.upper()}", points),), log_x=True, limits=limit))
    rates = [(_budget(trial), rate) for trial in trials if (rate := _rate(trial, evidence)) is not None]
    missed = [point for point, trial in zip(rates, trials, strict=False) if not trial.feasible]
    series = [Series(goal, rates), *([Series("of those not feasible", missed, "dots")] if missed else [])]
    charts.append(Chart(f"{goal} by token budget", _BUDGET, goal, tuple(series), log_x=True))
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


def _rate(trial: Trial, evidence: Evidence) -> float | None:
    return trial.goodput_rps if evidence.goal == "goodput" else trial.output_tokens_per_s
