"""Coordinate search: vary one knob at a time, each time starting from the best setting found so far."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llmsched.cli.tune.knobs import PeakDemand, Setting, headroom_settings, seqs_settings, target_settings
from llmsched.cli.tune.preference import best_trial, leading_trial
from llmsched.cli.tune.race import Race
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import TrialRun


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Settings to search: the knobs to vary, their largest values, and the setting to start from."""

    knobs: tuple[str, ...]
    budgets: tuple[int, ...]  # values of max_num_batched_tokens, ascending
    start: Setting
    max_num_seqs: int
    max_headroom: float
    refused: dict[int, str] = field(default_factory=dict)  # budgets that do not fit into memory, and why


async def search(space: SearchSpace, race: Race) -> list[str]:
    """Vary one knob after the other, and compare the resulting settings in a race. Add all runs to `race.history`.

    Return notes for the user: which knobs were not searched, and how reliable the choice is.
    """
    history, notes = race.history, []
    first = [space.start]
    if "max_num_batched_tokens" in space.knobs:
        first = [replace(space.start, max_num_batched_tokens=tokens) for tokens in space.budgets]
    if history.default not in first:
        first = sorted([*first, history.default], key=lambda setting: setting.max_num_batched_tokens)
    await race.qualify("max_num_batched_tokens", first)
    for tokens, reason in sorted(space.refused.items()):
        setting = replace(space.start, max_num_batched_tokens=tokens)
        history.add(TrialRun(setting, 0, 0, problem=f"does not fit: {reason}"))
    for knob in space.knobs:
        if knob == "max_num_batched_tokens":
            continue
        settings = _candidates(knob, space, history)
        if isinstance(settings, str):
            notes.append(f"{knob} was not searched: {settings}")
        elif race.out_of_time:
            notes.append(f"{knob} was not searched: out of time")
        else:
            await race.qualify(knob, settings)
    await _look_around(space, race)
    await race.final()
    skipped = [setting for setting in history.runs if history.trial(setting).skipped]
    if best_trial(history) is None and skipped:
        # Before reporting that no setting is feasible, measure the settings that were skipped on a prediction.
        await race.qualify("skipped settings", skipped, prune=False)
        await race.final()
    if race.disturbed_rounds:
        notes.append(f"short rounds repeated because the machine's speed changed: {race.disturbed_rounds}")
    best = best_trial(history)
    if best is not None and best.longest_run < race.full:
        notes.append(f"the choice rests on short runs: the first {best.longest_run:,} of {race.full:,} requests")
    if race.out_of_time:
        notes.append("the time limit ended the search early: longer runs or more repeats may change the choice")
    return notes


async def _look_around(space: SearchSpace, race: Race) -> None:
    """Run the best setting with the next smaller and larger token budgets. Repeat this while the best changes.

    Another budget may be best now, because the other knobs have other values than when budgets were compared.
    """
    leader = leading_trial(race.history)
    if leader is None or "max_num_batched_tokens" not in space.knobs:
        return
    if replace(leader.setting, max_num_batched_tokens=space.start.max_num_batched_tokens) == space.start:
        return
    for _ in range(len(space.budgets)):
        index = bisect_left(space.budgets, leader.setting.max_num_batched_tokens)
        around = space.budgets[max(0, index - 1) : index + 2]
        settings = [replace(leader.setting, max_num_batched_tokens=tokens) for tokens in around]
        if race.out_of_time or all(race.history.runs.get(setting) for setting in settings):
            return
        await race.qualify("max_num_batched_tokens again", settings)
        leader = leading_trial(race.history) or leader


def _candidates(knob: str, space: SearchSpace, history: TrialHistory) -> Sequence[Setting] | str:
    """Return the settings to compare for a knob, starting with the best so far, or the reason to skip the knob."""
    incumbent = leading_trial(history)
    known = [run.demand for run in history.all_runs if run.demand is not None]
    if incumbent is None or not known:
        return "no setting works so far"
    start = incumbent.setting
    demand = PeakDemand(
        max(demand.running for demand in known),
        max(demand.kv_share for demand in known),
        any(demand.preempted for demand in known),
    )
    if knob == "max_num_seqs":
        found = seqs_settings(start, demand, space.max_num_seqs)
        return found if len(found) > 1 else f"at most {demand.running} requests ran at once"
    if knob == "headroom":
        found = headroom_settings(start, demand, space.max_headroom)
        used = f"at most {demand.kv_share:.0%} of KV blocks were in use"
        return found if len(found) > 1 else f"KV was never scarce ({used})"
    found = target_settings(start, history.slo, space.budgets[-1])
    return found if len(found) > 1 else "it needs an SLO on ITL or TPOT (--slo-itl, --slo-tpot)"
