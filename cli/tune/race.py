"""A race of settings: short runs for all, longer ones for those ahead, repeats until it is clear who wins.

Successive halving (Jamieson and Talwalkar, 2016). All settings of a round get the same requests, one after the other,
and every second round goes backwards, so that drift of the machine falls on all alike. Whatever goes wrong with one
setting is its result, never the end of the race.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.pruning import hopeless
from llmsched.cli.tune.trial_runs import TrialRun, failed_run
from llmsched.cli.tune.trials import TrialHistory

#: How far beyond a limit a P99 of a short run may lie: it rests on few samples.
SLACK = 1.25
#: Shares of the load that the first rounds send.
RUNGS = (0.25, 0.5, 1.0)
#: Share by which a setting must change within a round for the machine to be blamed.
DISTURBED = 0.15
#: Share of the time that short runs may take: the rest is for the best in full.
FOR_SHORT_RUNS = 0.6
#: How far behind the best a setting may lie to be run in full, as a share, and how many are at most.
REACH = 0.08
MOST_CONTENDERS = 3


class TrialRunner(Protocol):
    """Measures settings. An exception means that the setting does not work."""

    async def run(self, setting: Setting, requests: int, round_index: int) -> TrialRun:
        """Send the first `requests` of the load of a round, which is the same for all its settings."""
        ...

    def predict(self, settings: Sequence[Setting], requests: int) -> Mapping[Setting, TrialRun]:
        """What a cost model says of settings, measured ones among them; empty where there is none yet."""
        ...


@dataclass(frozen=True, slots=True)
class RaceRules:
    """`lengths` are the requests of the rounds, ascending; the best are run with the last up to `repeats` times.

    `time_limit` is in seconds: no round after the first is begun that would not end in it. `drifts`: the machine may
    change under a round, as real ones do; without it a run that was made need not be made again.
    """

    lengths: tuple[int, ...]
    repeats: int
    time_limit: float = math.inf
    drifts: bool = True

    @property
    def has_final(self) -> bool:
        """Whether the best are run once more, in full, after all have been told apart."""
        return len(self.lengths) > 1 or self.repeats > 1


def rung_lengths(requests: int, concurrency: int) -> tuple[int, ...]:
    """Requests of each round of a load of `requests`; none is so short that it would be all ramp."""
    least = min(requests, 2 * concurrency)
    return tuple(sorted({max(least, math.ceil(share * requests)) for share in RUNGS}))


class Race:
    """Runs rounds and keeps what they bring in `history`. `on_run(stage, done, total)` counts requests of a stage."""

    def __init__(
        self,
        runner: TrialRunner,
        history: TrialHistory,
        rules: RaceRules,
        on_run: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self.history = history
        self.out_of_time = False
        self.disturbed_rounds = 0
        self._runner = runner
        self._rules = rules
        self._on_run = on_run
        self._now = asyncio.get_running_loop().time
        self._start = self._now()
        self._num_rounds = 0
        self._pace: dict[Setting, float] = {}

    @property
    def full(self) -> int:
        """Requests of a run in full."""
        return self._rules.lengths[-1]

    async def __call__(self, stage: str, settings: Sequence[Setting], *, prune: bool = True) -> None:
        """Tell the good from the bad by short runs. Settings are given in order of preference.

        With `prune` those that a cost model says are hopeless are not run.
        """
        lengths = self._rules.lengths[:-1] or self._rules.lengths
        share = FOR_SHORT_RUNS if self._rules.has_final else 1.0
        self.history.consider(settings)
        alive, done = list(settings), 0
        for index, requests in enumerate(lengths):
            if (index and len(alive) < 2) or not self._in_time(alive, requests, share):
                break
            to_come = sum(n * max(2, len(alive) >> k) for k, n in enumerate(lengths[index + 1 :], start=1))
            total = done + requests * len(alive) + to_come
            alive = await self._round(stage, alive, requests, done, total, prune=prune and index == 0)
            if index == 0 and self._rules.drifts and await self._disturbed(alive, requests):
                alive = [s for s in alive if not any(run.problem for run in self.history.runs[s])]
                alive = await self._round(stage, alive, requests, done, total, prune=False)
            done += requests * len(alive)
            alive = self._survivors(alive)
        self._on_run(stage, done, done)

    async def _disturbed(self, settings: list[Setting], requests: int) -> bool:
        """Whether the machine changed under the round just run; if so what it brought is forgotten.

        The first short run of a setting decides whether there is a second: so one of them is run again to see.
        """
        round_index = self._num_rounds - 1
        ran = [run for s in settings for run in self.history.runs[s] if run.round_index == round_index]
        before = next((run for run in ran if self.history.score(run)), None)
        if before is None or len(ran) < 3 or not self._in_time([before.setting], requests, FOR_SHORT_RUNS):
            return False
        again = await self._run(before.setting, requests, round_index)
        ratio = (self.history.score(again) or 0.0) / (self.history.score(before) or 1.0)
        if 1 - DISTURBED <= ratio <= 1 / (1 - DISTURBED) or not self._in_time(settings, requests, FOR_SHORT_RUNS):
            return False
        self.history.forget(round_index)
        self.disturbed_rounds += 1
        return True

    async def final(self) -> None:
        """Run the best in full, again and again until it is clear who wins, or each has been `repeats` times."""
        rules, stage, done, full = self._rules, "the best in full", 0, self.full
        while contenders := self._contenders():
            runs = [sum(run.requests == full for run in self.history.runs[setting]) for setting in contenders]
            clear = min(runs) > 0 and self.history.ranking().settled(contenders)
            if clear or min(runs) >= rules.repeats or not self._in_time(contenders, full):
                break
            total = done + full * len(contenders) * (rules.repeats - min(runs))
            await self._round(stage, contenders, full, done, total, prune=False)
            done += full * len(contenders)
        self._on_run(stage, done, done)

    async def _round(
        self, stage: str, settings: list[Setting], requests: int, done: int, total: int, *, prune: bool
    ) -> list[Setting]:
        """Run each setting once; returns those that were. With `prune` the hopeless ones are left out."""
        backwards = self._num_rounds % 2 == 1
        left = settings[::-1] if backwards else list(settings)
        if prune and len(left) > 2:
            left.insert(1, left.pop())  # the ends first: what lies between them the model can tell from these
        ran: list[Setting] = []
        while left:
            if prune and len(self._measured()) >= 2:
                left, prune = self._without_hopeless(left, settings, requests), False
                if not ran and all(self.history.runs[setting] for setting in left):
                    break  # nothing new is left to try
                continue
            setting = left.pop(0)
            await self._run(setting, requests, self._num_rounds)
            ran.append(setting)
            done += requests
            self._on_run(stage, done, max(done, total))
        self._num_rounds += 1
        return [setting for setting in settings if setting in ran]

    async def _run(self, setting: Setting, requests: int, round_index: int) -> TrialRun:
        if not self._rules.drifts:
            # Runs of one length are all of one load: one round, whenever they were made.
            round_index = self._rules.lengths.index(requests)
            if known := [run for run in self.history.runs.get(setting, ()) if run.requests == requests]:
                return known[0]
        start = self._now()
        try:
            run = await self._runner.run(setting, requests, round_index)
        except Exception as problem:
            run = failed_run(setting, round_index, requests, problem)
        # A run that a journal knew has taken its time before.
        self._pace[setting] = (run.seconds or self._now() - start) / requests
        self.history.add(run)
        return run

    def _without_hopeless(self, left: list[Setting], settings: list[Setting], requests: int) -> list[Setting]:
        measured = self._measured()
        predicted = self._runner.predict(list(dict.fromkeys([*measured, *settings])), requests)
        out = hopeless([setting for setting in left if setting not in measured], predicted, self.history)
        self.history.skipped |= out
        return [setting for setting in left if setting not in out]

    def _measured(self) -> list[Setting]:
        return [setting for setting, runs in self.history.runs.items() if any(run.problem is None for run in runs)]

    def _survivors(self, settings: list[Setting]) -> list[Setting]:
        """Those worth a longer run, in order of preference: the better half, or the nearest misses if none is good."""
        good = self._good(settings)
        if not good:
            missed = [trial for s in settings if (trial := self.history.trial(s)).completed and not trial.failed]
            return [trial.setting for trial in sorted(missed, key=lambda t: t.miss(self.history.slo))[:2]]
        table = self.history.ranking()
        if table.settled(good) and all(self.history.trial(setting).feasible for setting in good):
            return [table.best(good)]
        ahead = table.ranked(good)[: max(2, math.ceil(len(settings) / 2))]
        # One whose P99 is a little too late may get better or worse with more samples: one that is sound goes along.
        ahead += table.ranked([setting for setting in good if self.history.trial(setting).feasible])[:1]
        return [setting for setting in good if setting in ahead]

    def _contenders(self) -> list[Setting]:
        """The few that may be the best, in order of preference; the nearest miss if none can."""
        good = self._good(self._measured())
        if not good:
            nearest, full = next(iter(self.history.missed()), None), self.full
            in_full = [s for s in self._measured() if self.history.trial(s).longest == full]
            enough = nearest is None or nearest.longest == full or len(in_full) >= MOST_CONTENDERS
            return [] if nearest is None or enough else [nearest.setting]
        table = self.history.ranking()
        ranked = table.ranked(good)
        near = [setting for setting in ranked if table.share(setting, ranked[0]) >= 1 - REACH]
        return [setting for setting in good if setting in near[:MOST_CONTENDERS]]

    def _good(self, settings: Sequence[Setting]) -> list[Setting]:
        """Those that work and meet the SLOs; a short run may miss them by a little."""
        full, trials = self.full, [self.history.trial(setting) for setting in settings]
        return [
            trial.setting
            for trial in trials
            if trial.feasible
            or (trial.completed and not trial.failed and trial.longest < full and trial.miss(self.history.slo) <= SLACK)
        ]

    def _in_time(self, settings: Sequence[Setting], requests: int, share: float = 1.0) -> bool:
        """Whether a round of these would end in this share of the time; the first round is always begun."""
        if not self._pace:
            return True
        typical = sum(self._pace.values()) / len(self._pace)
        expected = sum(self._pace.get(setting, typical) for setting in settings) * requests
        if self._now() - self._start + expected <= share * self._rules.time_limit:
            return True
        self.out_of_time = True
        return False
