"""Pruning of settings that a cost model predicts to be far worse than the best setting.

Predictions are corrected by their mean error for the settings measured so far. A setting is pruned only if it is worse
by a margin, which grows with the largest error that remains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import Predictions
from llmsched.cli.tune.trials import Trial, figure_name, judge

#: A setting is pruned if its predicted rate is this share below the best, or its predicted latency this share above an
#: SLO. The error of the model is added to the share.
MARGIN = 0.15
#: A setting is pruned for its latency only if the predicted latency is above this many times the SLO.
FAR = 2.0
#: Predictions are ignored if their largest remaining error (a log ratio) is above this value.
MOST_ERROR = 0.5


def hopeless(settings: Sequence[Setting], predicted: Predictions, history: TrialHistory) -> dict[Setting, str]:
    """Return the settings that cannot be the best according to the predictions, each mapped to the reason.

    `predicted` has predicted runs of `settings` and of the settings measured so far.
    """
    table = history.ranking("throughput")
    known = [s for s in predicted if math.isfinite(table.effects.get(s, -math.inf)) and predicted[s].rate("throughput")]
    bias = _bias([table.effects[s] - _log(predicted[s].rate("throughput")) for s in known])
    if bias is None:
        return {}
    shift, error = bias
    trials = {setting: judge(setting, [run], history.slo) for setting, run in predicted.items()}
    late = _late(settings, trials, known, history)
    rates = {setting: _log(run.rate("throughput")) + shift for setting, run in predicted.items()}
    rates |= {setting: table.effects[setting] for setting in known}
    # A fast setting that misses an SLO must not rule out a slower one.
    judged = [history.trial(s) if history.runs.get(s) else trials[s] for s in predicted]
    rivals = [trial for trial in judged if trial.feasible and trial.setting not in late]
    best = max((rates[t.setting] + _log(t.attainment.get("all", 1.0)) for t in rivals), default=-math.inf)
    found = dict(late)
    for setting in settings:
        behind = best - rates.get(setting, best)
        if setting not in late and behind > MARGIN + 2 * error:
            found[setting] = f"not measured: predicted {-math.expm1(-behind):.0%} less throughput than the best"
    return found


def _late(
    settings: Sequence[Setting], trials: Mapping[Setting, Trial], known: Sequence[Setting], history: TrialHistory
) -> dict[Setting, str]:
    found: dict[Setting, str] = {}
    for name, limit in history.slo.given().items():
        pairs = [(history.trial(s).held.get(name), trials[s].held.get(name)) for s in known]
        bias = _bias([math.log(measured / said) for measured, said in pairs if measured and said])
        if bias is None:
            continue
        shift, error = bias
        for setting in settings:
            said = trials[setting].held.get(name, 0.0) * math.exp(shift) if setting in trials else 0.0
            if said > limit * max(FAR, 1 + MARGIN + 2 * error):
                figure = f"predicted {figure_name(name, history.slo)} {said * 1e3:.0f} ms"
                found.setdefault(setting, f"not measured: {figure} is far above {limit * 1e3:g} ms")
    return found


def _log(value: float | None) -> float:
    return math.log(value) if value else -math.inf


def _bias(log_ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean of log ratios (measured to predicted figure) and the largest deviation from the mean.

    Return None if the deviation exceeds MOST_ERROR, or if there are fewer than two ratios.
    """
    if len(log_ratios) < 2:
        return None
    shift = sum(log_ratios) / len(log_ratios)
    error = max(abs(ratio - shift) for ratio in log_ratios)
    return (shift, error) if error <= MOST_ERROR else None
