"""The search: one knob after the other, each from what the one before it found."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from llmsched.cli.tune.knobs import Setting, headroom_settings, seqs_settings, target_settings
from llmsched.cli.tune.race import Race
from llmsched.cli.tune.trial_runs import refused_run
from llmsched.cli.tune.trials import TrialHistory


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Where to search: the knobs, the token budgets, the setting to start from, and how large others may become.

    `refused` are larger budgets, with what was wrong when an engine was to be built for them.
    """

    knobs: tuple[str, ...]
    budgets: tuple[int, ...]
    start: Setting
    max_num_seqs: int
    max_headroom: float
    refused: Mapping[int, Exception] = field(default_factory=dict)


async def search(space: SearchSpace, race: Race) -> list[str]:
    """Race the values of each knob. The result is in `race.history`; returned is what was left out, and why."""
    history, notes = race.history, []
    first = [space.start]
    if "max_num_batched_tokens" in space.knobs:
        first = [replace(space.start, max_num_batched_tokens=tokens) for tokens in space.budgets]
    await race("max_num_batched_tokens", first)
    for tokens, problem in sorted(space.refused.items()):
        history.add(refused_run(replace(space.start, max_num_batched_tokens=tokens), problem))
    for knob in space.knobs:
        if knob == "max_num_batched_tokens":
            continue
        settings = _next(knob, space, history)
        if isinstance(settings, str):
            notes.append(f"{knob} was left as it is: {settings}")
        elif race.out_of_time:
            notes.append(f"{knob} was left as it is: the time was over")
        else:
            await race(knob, settings)
    await _look_around(space, race)
    await race.final()
    skipped = [setting for setting in history.runs if history.trial(setting).skipped]
    if history.best() is None and skipped:
        # Whoever says that nothing is good enough has to have tried it.
        await race("what was left out", skipped, prune=False)
        await race.final()
    if race.disturbed_rounds:
        notes.append(f"the machine changed under {race.disturbed_rounds} of the first rounds, which were run again")
    best = history.best()
    if best is not None and best.longest < race.full:
        notes.append(f"the choice rests on runs of the first {best.longest:,} of {race.full:,} requests")
    if race.out_of_time:
        notes.append("the time was over before the search was: longer runs or more repeats may change the choice")
    return notes


async def _look_around(space: SearchSpace, race: Race) -> None:
    """With other knobs changed another budget may be the best: try its neighbours until the middle one is."""
    leader = race.history.leader()
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
        await race("max_num_batched_tokens again", settings)
        leader = race.history.leader() or leader


def _next(knob: str, space: SearchSpace, history: TrialHistory) -> Sequence[Setting] | str:
    """The settings of the next race, the incumbent first; else why there is none."""
    incumbent = history.leader()
    demand = history.demand()
    if incumbent is None or demand is None:
        return "no setting works so far"
    start = incumbent.setting
    if knob == "max_num_seqs":
        found = seqs_settings(start, demand, space.max_num_seqs)
        return found if len(found) > 1 else f"no more than {demand.running} requests ran at a time"
    if knob == "headroom":
        found = headroom_settings(start, demand, space.max_headroom)
        used = f"at most {demand.kv_share:.0%} of KV blocks were in use"
        return found if len(found) > 1 else f"KV was never scarce ({used})"
    found = target_settings(start, history.slo, space.budgets[-1])
    return found if len(found) > 1 else "it needs an SLO of ITL or TPOT (--slo-itl, --slo-tpot)"
