from __future__ import annotations

import math
from collections.abc import Sequence

from llmsched.cli.tune.knobs import Setting, distance
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trials import Trial

#: Margins to the SLOs (1 - figure / SLO, of the SLO that is nearest) count as equal if they differ by at most this.
MARGIN_TOLERANCE = 0.1


def contenders(history: TrialHistory) -> dict[Setting, Trial]:
    """Return the feasible trials with the longest runs. A setting with only shorter runs has left the race."""
    feasible = [trial for trial in history.trials() if trial.feasible]
    longest = max((trial.longest_run for trial in feasible), default=0)
    return {trial.setting: trial for trial in feasible if trial.longest_run == longest}


def best_trial(history: TrialHistory) -> Trial | None:
    """Return the trial of `history.chosen` or, if that is None, of the feasible setting with the highest score.

    If several scores differ from the highest only by noise, `preferred(...)` decides. Return None if no setting is
    feasible.
    """
    if history.chosen is not None:
        return history.trial(history.chosen)
    feasible = contenders(history)
    level = history.ranking().level(list(feasible)) if feasible else []
    return preferred([feasible[setting] for setting in level], history.default) if level else None


def preferred(equals: Sequence[Trial], default: Setting) -> Trial:
    """Return the trial with the largest margin to the SLOs or, if margins are about equal, the nearest to `default`."""
    least = min(trial.miss for trial in equals)
    near = [trial for trial in equals if trial.miss <= least + MARGIN_TOLERANCE]
    return min(near, key=lambda trial: distance(trial.setting, default))


def leading_trial(history: TrialHistory) -> Trial | None:
    """Return the feasible trial with the highest score, ignoring noise, or else the trial nearest to the SLOs."""
    feasible = contenders(history)
    return feasible[history.ranking().ranked(list(feasible))[0]] if feasible else nearest_miss(history)


def relative_scores(history: TrialHistory) -> dict[Setting, float]:
    """Return the ratio of each score to that of the best setting or, if none is feasible, to the highest score."""
    table, best = history.ranking(), best_trial(history)
    ranked = [best.setting] if best else table.ranked(list(table.effects))
    if not ranked or not math.isfinite(table.effects.get(ranked[0], -math.inf)):
        return {}
    return {setting: table.share(setting, ranked[0]) for setting in table.effects}


def missed_trials(history: TrialHistory) -> list[Trial]:
    """Return the trials that missed an SLO without a failure, the nearest to the SLOs first."""
    worked = [setting for setting, runs in history.runs.items() if runs and not any(run.problem for run in runs)]
    missed = [trial for trial in map(history.trial, worked) if not trial.feasible]
    return sorted(missed, key=lambda trial: trial.miss)


def nearest_miss(history: TrialHistory) -> Trial | None:
    """Return the trial that missed the SLOs by least, or None if no trial missed them. Only the longest runs count."""
    missed = missed_trials(history)
    longest = max((trial.longest_run for trial in missed), default=0)
    return next((trial for trial in missed if trial.longest_run == longest), None)
