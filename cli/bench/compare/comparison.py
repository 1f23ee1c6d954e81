"""The same seeded work under each variant, in turn, round by round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from llmsched.cli.bench.compare.usage import Usage, usage
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.load.load import Load
from llmsched.cli.targets.load_run import LoadRun
from llmsched.engine.latency import Slo
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.progress import Progress


@dataclass(frozen=True, slots=True)
class Task:
    """What is done under each variant: `workload` with its seed, then with the next one, and so on for `rounds`."""

    workload: Load
    slo: Slo
    timeout: float
    warmup: int
    rounds: int


class Done(NamedTuple):
    """A run: by whom, and under which memory plan. It has a meter."""

    run: LoadRun
    experiment: Experiment
    plan: MemoryPlan


class Perform(Protocol):
    """Does a workload with the settings of the variant of that name, on an engine that has served nothing yet."""

    async def __call__(self, name: str, workload: Load, task: Task, progress: Progress) -> Done: ...


@dataclass(frozen=True, slots=True)
class Compared:
    """One variant: the figures of all its rounds together, those of each round, and memory."""

    name: str
    experiment: Experiment
    figures: Measurement
    rounds: tuple[Measurement, ...]
    usage: Usage


@dataclass(slots=True)
class _Rounds:
    """What one variant has done so far."""

    done: list[Done] = field(default_factory=list)

    def result(self, name: str, task: Task) -> Compared:
        runs = [one.run for one in self.done]
        rounds = tuple(run.measure(task.workload, task.slo) for run in runs)
        whole = one_after_the_other(runs).measure(task.workload, task.slo)
        last = self.done[-1]
        found = usage(last.plan, [run.meter for run in runs if run.meter is not None])
        return Compared(name, last.experiment, with_rates_of(rounds, whole), rounds, found)


async def compare(names: Sequence[str], perform: Perform, task: Task, progress: Progress) -> list[Compared]:
    """Run the task under each of the named variants.

    In each round all variants have the same requests; the next round has others, so that no figure rests on one draw.
    """
    results = {name: _Rounds() for name in names}
    for number in range(task.rounds):
        workload = task.workload.with_seed(task.workload.seed + number)
        for name, into in results.items():

            def told(_: str, done: int, total: int, name: str = name, number: int = number) -> None:
                progress(f"{name}, round {number + 1}", done, total)

            into.done.append(await perform(name, workload, task, told))
    return [rounds.result(name, task) for name, rounds in results.items()]


def with_rates_of(rounds: Sequence[Measurement], whole: Measurement) -> Measurement:
    """The figures of all rounds together, but the mean of the rounds for rates that know ramp, drain or schedule: where
    one round follows another, nothing is sent and little is served.
    """
    if len(rounds) == 1:
        return whole

    def mean(rates: Iterable[float | None]) -> float | None:
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(known) if len(known) == len(rounds) else None

    return replace(
        whole,
        steady_window=None,
        output_tokens_per_s_steady=mean(one.output_tokens_per_s_steady for one in rounds),
        requests_per_s_steady=mean(one.requests_per_s_steady for one in rounds),
        scheduled_rate=mean(one.scheduled_rate for one in rounds),
        achieved_rate=mean(one.achieved_rate for one in rounds),
    )


def one_after_the_other(runs: Sequence[LoadRun]) -> LoadRun:
    """Several runs as one: each begins when the one before it has ended."""
    records: list[RequestRecord] = []
    now = 0.0
    for run in runs:
        start = min((record.scheduled for record in run.records), default=0.0)
        moved = [record.moved(now - start, len(records)) for record in run.records]
        now = max((record.end for record in moved if record.end is not None), default=now)
        records += moved
    preempted = [run.preemptions for run in runs if run.preemptions is not None]
    lags = [run.loop_lags for run in runs if run.loop_lags is not None]
    return LoadRun(
        records,
        sum(preempted) if len(preempted) == len(runs) else None,
        [lag for some in lags for lag in some] if lags else None,
        runs[0].own_process,
    )
