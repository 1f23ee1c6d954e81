"""Sentences about a search: why a setting was chosen, and its gain over the default."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmsched.cli.tune.knobs import Setting, describe
from llmsched.cli.tune.preference import best_trial, missed_trials, nearest_miss, relative_scores
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import Goal
from llmsched.cli.tune.trials import Trial
from llmsched.cli.tune.tuning import TuneOutcome


def gain(outcome: TuneOutcome) -> float | None:
    """Return the gain of the best setting over the default, for example 0.1 for 10 %.

    The gain compares the knees or, if a knee is unknown, the rates that the search maximises. Return None if no setting
    is feasible or the default's rate is unknown.
    """
    history, rates, best = outcome.history, outcome.rates, best_trial(outcome.history)
    if best is None:
        return None
    if best.setting == history.default:
        return 0.0
    if rates.best.met and rates.default.met:
        return rates.best.met / rates.default.met - 1
    share = relative_scores(history).get(history.default)
    return 1 / share - 1 if share else None


def conclusion(outcome: TuneOutcome) -> str:
    """Return why the setting was chosen, its gain over the default, and how the given load compares with the knee."""
    history, rates, best = outcome.history, outcome.rates, best_trial(outcome.history)
    if best is None:
        return explain(history)
    default, over = history.default, gain(outcome)
    settings = [trial.setting for trial in history.trials() if not trial.skipped]
    chosen, usual = describe(best.setting, settings), describe(default, settings)
    if (knee := rates.best.met) is None:
        more = "" if over is None else f", {over:+.0%} {history.goal} over it"
        tail = "it is the default" if best.setting == default else f"the default is {usual}{more}"
        return f"{explain(history)}; {tail}"
    most = f"up to {'at least ' if rates.best.missed is None else ''}{knee:.3g} requests/s"
    if best.setting == default:
        none = "no other setting is better" if len(settings) > 1 else "no other setting was measured in time"
        found = f"the default stays: {usual} meets the SLOs {most}, and {none}"
    elif rates.default.met is None:
        found = f"{chosen} meets the SLOs {most}; the default ({usual}) misses them under the given load"
    elif over is not None and over > 0:
        found = f"{chosen} meets the SLOs {most}, {over:.0%} more than the default ({usual}: {rates.default.met:.3g})"
    else:
        found = f"{chosen} meets the SLOs {most}, as the default ({usual}) does, with more margin"
    if rates.given is None:
        return found
    if math.isinf(rates.given):
        return f"{found}; the given load sends all requests at once, past the knee"
    return f"{found}; the given load, {rates.given:.3g} requests/s, is {rates.given / knee:.0%} of that"


def explain(history: TrialHistory) -> str:
    """Return a sentence that explains why the best setting was chosen, or why no setting was chosen."""
    trials, best = [trial for trial in history.trials() if not trial.skipped], best_trial(history)
    settings = [trial.setting for trial in trials]
    if not trials:
        return "the time limit ended the first run, so nothing was measured; set a longer --time-limit"
    if best is None:
        alone, none = len(trials) == 1, f"none of the {len(trials)} settings"
        if (nearest := nearest_miss(history)) is None:
            return "the only setting tried does not work; see its reason" if alone else f"{none} works; see the reasons"
        name = describe(nearest.setting, settings)
        missed = f"the only setting tried, {name}, misses an SLO"
        nothing = missed if alone else f"{none} meets the SLOs; the nearest is {name}"
        return f"{nothing}: {nearest.reason}; relax the SLOs or lower the load"
    good = [trial for trial in trials if trial.feasible]
    chosen = f"{describe(best.setting, settings)}: {rate_in_words(best, history.goal)}"
    if len(good) == 1:
        met = "meets the SLOs" if history.slo.given() else "works (no SLO was given)"
        tried = f"it is the only one of {len(trials)} settings that" if len(trials) > 1 else "the only setting tried"
        return f"{chosen}; {tried} {met}{_faster(best, history, settings)}"
    met = "meet the SLOs" if history.slo.given() else "work (no SLO was given)"
    rank = f"{_rank(best, good, history, settings)}; {len(good)} of {len(trials)} settings {met}"
    return f"{chosen} {rank}{_faster(best, history, settings)}"


def rate_in_words(trial: Trial, goal: Goal) -> str:
    tokens = f"{trial.output_tokens_per_s or 0.0:.1f} tokens/s"
    return f"{trial.goodput_rps or 0.0:.3g} good requests/s ({tokens})" if goal == "goodput" else tokens


def _rank(best: Trial, good: Sequence[Trial], history: TrialHistory, settings: Sequence[Setting]) -> str:
    table = history.ranking()
    rivals = [trial.setting for trial in good if trial.longest_run == best.longest_run]
    ahead = max(rivals, key=lambda setting: table.share(setting, best.setting))
    if ahead != best.setting:
        noise = f"{table.noise(ahead, best.setting):.0%}"
        within = f"within {noise}" if history.exact else f"within the noise ({noise})"
        return f"is {within} of the highest ({describe(ahead, settings)})"
    if any(table.share(trial.setting, best.setting) > 1 for trial in good):
        return f"is the highest of the {len(rivals)} settings that had full runs"
    return "is the highest"


def _faster(best: Trial, history: TrialHistory, settings: Sequence[Setting]) -> str:
    """Return a remark if a setting that missed an SLO is faster than the best one by more than the noise, else ""."""
    table, late = history.ranking("throughput"), missed_trials(history)
    fastest = max(late, key=lambda trial: table.share(trial.setting, best.setting), default=None)
    if fastest is None:
        return ""
    more = table.share(fastest.setting, best.setting) - 1
    if more <= table.noise(fastest.setting, best.setting):
        return ""
    return f"; {describe(fastest.setting, settings)} gave {more:.0%} more tokens/s, but its {fastest.reason}"
