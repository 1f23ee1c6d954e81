"""Settings that a cost model says are hopeless. Pure.

The model is held to what it said of the settings that were measured: its common error is taken out, and the more its
errors differ the more it is forgiven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.trial_runs import TrialRun
from llmsched.cli.tune.trials import Trial, TrialHistory, figure_name, judge

#: How far behind the best, or beyond a limit, a prediction must be to count, as a share, for a model without errors.
MARGIN = 0.15
#: Beyond this the model is not believed at all.
MOST_ERROR = 0.5


class ModelBias(NamedTuple):
    """How measured figures lie to predicted ones: the logarithm of their typical ratio, and the worst share off it."""

    shift: float
    error: float


def hopeless(
    settings: Sequence[Setting], predicted: Mapping[Setting, TrialRun], history: TrialHistory
) -> dict[Setting, str]:
    """Which of the settings need not be measured, with the reason. `predicted` has measured settings as well.

    What is compared is throughput, which bounds goodput: near a limit a small error in latency turns all goodput into
    none, and latencies are held against the limits on their own.
    """
    table = history.throughput()
    known = [s for s in predicted if math.isfinite(table.effects.get(s, -math.inf)) and predicted[s].throughput]
    bias = _bias([table.effects[s] - _log(predicted[s].throughput) for s in known])
    if bias is None or bias.error > MOST_ERROR:
        return {}
    trials = {setting: judge(setting, [run], history.slo) for setting, run in predicted.items()}
    late = _late(settings, trials, known, history)
    rates = {setting: _log(run.throughput) + bias.shift for setting, run in predicted.items()}
    rates |= {setting: table.effects[setting] for setting in known}
    # What is fast and misses an SLO is no reason to leave out what is slower.
    rivals = [trial for s in predicted if (trial := _as_known(s, trials, history)).feasible and s not in late]
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
    """Settings predicted to miss an SLO by more than the model is off in that figure."""
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


def _as_known(setting: Setting, predicted: Mapping[Setting, Trial], history: TrialHistory) -> Trial:
    """A setting as it was measured, else as it is predicted."""
    return history.trial(setting) if history.runs.get(setting) else predicted[setting]


def _log(value: float | None) -> float:
    return math.log(value) if value else -math.inf


def _bias(differences: Sequence[float]) -> ModelBias | None:
    if len(differences) < 2:
        return None
    shift = sum(differences) / len(differences)
    return ModelBias(shift, max(abs(difference - shift) for difference in differences))
