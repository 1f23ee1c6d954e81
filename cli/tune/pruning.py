"""Pruning of settings that a cost model predicts to be far from the best. Pure.

The predictions are calibrated with the settings measured so far: their common error is corrected, and the remaining
error widens the margin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.trial_runs import TrialRun
from llmsched.cli.tune.trials import Trial, TrialHistory, figure_name, judge

#: Share by which a prediction must be behind the best, or above an SLO, if the model had no error.
MARGIN = 0.15
#: Error (a log ratio) above which the predictions are ignored.
MOST_ERROR = 0.5


class ModelBias(NamedTuple):
    """Log ratio of measured to predicted figures: its mean, and the largest deviation from it."""

    shift: float
    error: float


def hopeless(
    settings: Sequence[Setting], predicted: Mapping[Setting, TrialRun], history: TrialHistory
) -> dict[Setting, str]:
    """Return the settings that need not be measured, with the reason. `predicted` includes measured settings.

    Settings are compared by throughput, which bounds goodput: near an SLO, a small error in latency would turn all
    goodput into none. Latencies are compared with the SLOs separately.
    """
    table = history.throughput_ranking()
    known = [s for s in predicted if math.isfinite(table.effects.get(s, -math.inf)) and predicted[s].throughput]
    bias = _bias([table.effects[s] - _log(predicted[s].throughput) for s in known])
    if bias is None or bias.error > MOST_ERROR:
        return {}
    trials = {setting: judge(setting, [run], history.slo) for setting, run in predicted.items()}
    late = _late(settings, trials, known, history)
    rates = {setting: _log(run.throughput) + bias.shift for setting, run in predicted.items()}
    rates |= {setting: table.effects[setting] for setting in known}
    # A fast setting that misses an SLO must not rule out a slower one.
    judged = [history.trial(s) if history.runs.get(s) else trials[s] for s in predicted]
    rivals = [trial for trial in judged if trial.feasible and trial.setting not in late]
    best = max((rates[t.setting] + _log(t.attainment.get("all", 1.0)) for t in rivals), default=-math.inf)
    found = dict(late)
    for setting in settings:
        behind = best - rates.get(setting, best)
        if setting not in late and behind > MARGIN + 2 * bias.error:
            found[setting] = f"not measured: predicted {-math.expm1(-behind):.0%} less throughput than the best"
    return found


def _late(
    settings: Sequence[Setting], trials: Mapping[Setting, Trial], known: Sequence[Setting], history: TrialHistory
) -> dict[Setting, str]:
    """Return the settings predicted to miss an SLO by more than the model's error in that figure."""
    found: dict[Setting, str] = {}
    for name, limit in history.slo.given().items():
        pairs = [(history.trial(s).held.get(name), trials[s].held.get(name)) for s in known]
        bias = _bias([math.log(measured / said) for measured, said in pairs if measured and said])
        if bias is None or bias.error > MOST_ERROR:
            continue
        for setting in settings:
            said = trials[setting].held.get(name, 0.0) * math.exp(bias.shift) if setting in trials else 0.0
            if said > limit * (1 + MARGIN + 2 * bias.error):
                figure = f"predicted {figure_name(name, history.slo)} {said * 1e3:.0f} ms"
                found.setdefault(setting, f"not measured: {figure} is far above {limit * 1e3:g} ms")
    return found


def _log(value: float | None) -> float:
    return math.log(value) if value else -math.inf


def _bias(differences: Sequence[float]) -> ModelBias | None:
    if len(differences) < 2:
        return None
    shift = sum(differences) / len(differences)
    return ModelBias(shift, max(abs(difference - shift) for difference in differences))
