"""Race of settings: all settings get short runs, and the leaders get longer runs until the winner is clear.

The method is successive halving (Jamieson and Talwalkar, 2016). In a round, all settings serve the same requests, one
setting after the other. Every second round has the reverse order, so that drift of the machine's speed affects all
settings alike.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.predicted_pruning import hopeless
from llmsched.cli.tune.preference import missed_trials
from llmsched.cli.tune.time_limit import FOR_SHORT_RUNS, OutOfTimeError, TimeLimit
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import TrialRun, TrialRunner, attempt
from llmsched.engine.progress import Progress, silent

#: Factor by which a latency may exceed its SLO in short runs before the setting leaves the race. It is above 1 because
#: short runs give few samples for a P99.
SLACK = 1.25
#: Lengths of rounds, as shares of the load's requests.
RUNGS = (0.25, 0.5, 1.0)
#: After the first round, one setting runs again. If its score differs by more than this share, the round is repeated.
DISTURBED = 0.15
#: After a short round, one in HALVING settings stays in the race.
HALVING = 2
#: At most MOST_FINALISTS settings get full runs. Their scores are at most the share REACH below the best score.
REACH = 0.08
MOST_FINALISTS = 3


def rung_lengths(requests: int, concurrency: int) -> tuple[int, ...]:
    """Return the possible lengths of a round in requests, ascending. Each is long enough to outlast the ramp-up."""
    least = min(requests, 2 * concurrency)
    return tuple(sorted({max(least, math.ceil(share * requests)) for share in RUNGS}))


class Race:
    """Race of settings over several rounds. Every run is added to `history`.

    `lengths` are the possible lengths of a round in requests, ascending. The best settings get up to `rounds` runs of
    the last length, or one if `history.exact`. `time_limit` is in seconds, `rate` in requests per second (None: the
    load's own rate).
    """

    def __init__(
        self,
        runner: TrialRunner,
        history: TrialHistory,
        lengths: Sequence[int],
        rounds: int,
        time_limit: float = math.inf,
        progress: Progress = silent,
        rate: float | None = None,
    ) -> None:
        self.history = history
        self.full = lengths[-1]
        self.disturbed_rounds = 0
        self._limit = TimeLimit(time_limit)
        self._runner, self._rate, self._progress = runner, rate, progress
        self._lengths, self._rounds = lengths, 1 if history.exact else rounds
        self._num_rounds = 0

    @property
    def out_of_time(self) -> bool:
        return self._limit.was_hit

    async def qualify(self, stage: str, settings: Sequence[Setting], *, prune: bool = True) -> None:
        """Run the settings in short rounds. After each round, the better half stays in the race."""
        lengths = self._lengths[:-1] or self._lengths
        share = FOR_SHORT_RUNS if len(self._lengths) > 1 or self._rounds > 1 else 1.0
        self.history.consider(settings)
        alive = list(settings)
        for index, requests in enumerate(lengths):
            if (index and len(alive) < 2) or not self._limit.allows(alive, requests, share):
                break
            alive = await self._round(stage, alive, requests, prune=prune and index == 0)
            if index == 0 and not self.history.exact and await self._disturbed(alive, requests):
                alive = [s for s in alive if not any(run.problem for run in self.history.runs[s])]
                alive = await self._round(stage, alive, requests)
            alive = self._survivors(alive)

    async def final(self) -> None:
        """Give the best settings full runs until the winner is clear, each has had `rounds` runs, or time is up."""
        while finalists := self._finalists():
            fewest = min(sum(run.requests == self.full for run in self.history.runs[each]) for each in finalists)
            clear = fewest > 0 and self.history.ranking().settled(finalists)
            if clear or fewest >= self._rounds or not self._limit.allows(finalists, self.full):
                break
            await self._round("the best in full", finalists, self.full)

    async def _disturbed(self, settings: list[Setting], requests: int) -> bool:
        """Run one setting of the last round again. If its score has changed, forget the round and return True."""
        round_index, goal = self._num_rounds - 1, self.history.goal
        ran = [run for s in settings for run in self.history.runs[s] if run.round_index == round_index]
        before = next((run for run in ran if run.rate(goal)), None)
        if before is None or len(ran) < 3 or not self._limit.allows([before.setting], requests, FOR_SHORT_RUNS):
            return False
        if (again := await self._run(before.setting, requests, round_index)) is None:
            return False
        ratio = (again.rate(goal) or 0.0) / (before.rate(goal) or 1.0)
        if 1 - DISTURBED <= ratio <= 1 / (1 - DISTURBED) or not self._limit.allows(settings, requests, FOR_SHORT_RUNS):
            return False
        self.history.forget(round_index)
        self.disturbed_rounds += 1
        return True

    async def _round(
        self, stage: str, settings: Sequence[Setting], requests: int, *, prune: bool = False
    ) -> list[Setting]:
        """Run each setting once, until time is up. Return the settings that ran."""
        left = list(settings[::-1] if self._num_rounds % 2 else settings)
        if prune and len(left) > 2:
            left.insert(1, left.pop())  # both ends first: the model interpolates between them
        if self._limit.is_first_run and (default := self.history.default) in left:
            left.insert(0, left.pop(left.index(default)))  # so that even a search that runs out of time has its figures
        ran: list[Setting] = []
        while left:
            if prune and len(self.history.worked()) >= 2:
                prune, left = False, self._plausible(left, settings, requests)
                if not ran and all(self.history.runs[setting] for setting in left):
                    break  # no untried setting is left
                continue
            self._progress(f"{stage}, {requests:,} requests each", len(ran), len(ran) + len(left))
            setting = left.pop(0)
            if await self._run(setting, requests, self._num_rounds) is None:
                break
            ran.append(setting)
        self._num_rounds += 1
        return [setting for setting in settings if setting in ran]

    def _plausible(self, left: Sequence[Setting], settings: Sequence[Setting], requests: int) -> list[Setting]:
        measured = self.history.worked()
        predicted = self._runner.predict(list(dict.fromkeys([*measured, *settings])), requests, self._rate)
        out = hopeless([setting for setting in left if setting not in measured], predicted, self.history)
        self.history.skipped |= out
        return [setting for setting in left if setting not in out]

    async def _run(self, setting: Setting, requests: int, round_index: int) -> TrialRun | None:
        if self.history.exact:
            # Exact runs of one length belong to one round, and a repeated run would give the same figures.
            round_index = self._lengths.index(requests)
            if known := [run for run in self.history.runs.get(setting, ()) if run.requests == requests]:
                return known[0]
        now = asyncio.get_running_loop().time
        start = now()
        try:
            if self._limit.passed:
                raise OutOfTimeError
            run = await attempt(self._runner, setting, requests, round_index, self._rate)
        except OutOfTimeError:
            self._limit.was_hit = True
            return None
        # A run restored from the journal returns at once, but has recorded its time.
        self._limit.record(setting, requests, run.seconds or now() - start)
        self.history.add(run)
        return run

    def _survivors(self, settings: list[Setting]) -> list[Setting]:
        """Return about half of the settings: the best that meet the SLOs or, if none does, the two nearest to them."""
        good = self._good(settings)
        if not good:
            return [trial.setting for trial in missed_trials(self.history) if trial.setting in settings][:2]
        table = self.history.ranking()
        if table.settled(good) and all(self.history.trial(setting).feasible for setting in good):
            return [table.best(good)]
        ahead = table.ranked(good)[: max(2, math.ceil(len(settings) / HALVING))]
        # A P99 slightly above its SLO may move either way with more samples, so keep one feasible setting as well.
        ahead += table.ranked([setting for setting in good if self.history.trial(setting).feasible])[:1]
        return [setting for setting in good if setting in ahead]

    def _finalists(self) -> list[Setting]:
        """Return the settings to run in full: the best that meet the SLOs or, if none does, the nearest to the SLOs."""
        measured = self.history.worked()
        good = self._good(measured)
        if not good:
            in_full = sum(self.history.trial(setting).longest_run == self.full for setting in measured)
            nearest = missed_trials(self.history)[: 1 if in_full < MOST_FINALISTS else 0]
            return [trial.setting for trial in nearest if trial.longest_run < self.full]
        table = self.history.ranking()
        ranked = table.ranked(good)
        near = [setting for setting in ranked if table.share(setting, ranked[0]) >= 1 - REACH]
        return [setting for setting in good if setting in near[:MOST_FINALISTS]]

    def _good(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings that meet the SLOs. In a short run, latencies may exceed an SLO by the factor SLACK."""
        good = []
        for trial in map(self.history.trial, settings):
            short = trial.completed and not trial.failed and trial.longest_run < self.full
            if trial.feasible or (short and trial.miss <= SLACK):
                good.append(trial.setting)
        return good
