"""The same seeded work under each variant in this process, in turn, round by round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from llmsched.cli.bench.compare.usage import Usage, usage
from llmsched.cli.bench.inprocess import EngineTarget, running
from llmsched.cli.bench.load import Load
from llmsched.cli.bench.measure import Measurement
from llmsched.cli.bench.prompts import usable_ids
from llmsched.cli.bench.record import RequestRecord
from llmsched.cli.bench.run import Run, send_workload, warm_up
from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.use import KVUse
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress, silent

if TYPE_CHECKING:
    from llmsched.engine.core import Engine
    from llmsched.engine.executor.torch_executor import TorchExecutor
    from llmsched.engine.kv.plan import MemoryPlan
    from llmsched.engine.service import AsyncEngine


@dataclass(frozen=True, slots=True)
class Task:
    """What is done under each variant: `workload` with its seed, then with the next one, and so on for `rounds`."""

    workload: Load
    slo: Slo
    timeout: float
    warmup: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Compared:
    """One variant: the figures of all its rounds together, those of each round, memory, and the settings used."""

    name: str
    target: str
    figures: Measurement
    rounds: tuple[Measurement, ...]
    usage: Usage
    settings: Mapping[str, Any]


@dataclass(slots=True)
class _Runs:
    """What one variant has done so far."""

    runs: list[Run] = field(default_factory=list)
    seen: list[KVUse] = field(default_factory=list)
    target: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    plan: MemoryPlan | None = None

    def result(self, name: str, task: Task) -> Compared:
        assert self.plan is not None
        figures = [run.measure(task.workload, task.slo) for run in [one_after_the_other(self.runs), *self.runs]]
        return Compared(name, self.target, figures[0], tuple(figures[1:]), usage(self.plan, self.seen), self.settings)


async def compare(configs: Mapping[str, EngineConfig], task: Task, progress: Progress) -> list[Compared]:
    """Run the task under each of the named settings. Raises ModelError and ConfigError.

    Every run starts with an engine of its own and an empty prefix cache. In each round all variants have the same
    requests; the next round has others, so that no figure rests on one draw.
    """
    engines = Engines(configs, progress)
    results = {name: _Runs() for name in configs}
    done, total = 0, task.rounds * len(configs)
    for round_index in range(task.rounds):
        workload = task.workload.with_seed(task.workload.seed + round_index)
        for name, into in results.items():
            progress("runs", done, total)
            async with engines.running(name, into.seen) as engine:
                await _run(engine, workload, task, into)
            done += 1
    progress("runs", done, total)
    return [runs.result(name, task) for name, runs in results.items()]


async def _run(engine: AsyncEngine, workload: Load, task: Task, into: _Runs) -> None:
    ids, target = usable_ids(engine.tokenizer, engine.model.vocab_size), EngineTarget(engine)
    before = len(into.seen)
    await warm_up(target, workload, task.warmup, ids=ids, timeout=task.timeout)
    await engine.reset_prefix_cache()
    del into.seen[before:]
    into.runs.append(await send_workload(target, workload, ids=ids, timeout=task.timeout, progress=silent))
    into.target, into.plan = target.name, engine.plan
    into.settings = {name: value for name, value in asdict(engine.config).items() if value is not None}


class Engines:
    """Engines of several settings, one at a time. Those that need the same memory share what is loaded once."""

    def __init__(self, configs: Mapping[str, EngineConfig], progress: Progress) -> None:
        self._configs = {name: _with_budget(config) for name, config in configs.items()}
        self._progress = progress
        self._built: Engine | None = None
        self._built_for: EngineConfig | None = None

    @asynccontextmanager
    async def running(self, name: str, seen: list[KVUse]) -> AsyncIterator[AsyncEngine]:
        """A new engine with the settings of that name, started; stopped when the block ends.

        What KV memory holds after each step is added to `seen`.
        """
        from llmsched.engine.build import RESERVING, engine_beside

        config = self._configs[name]
        built = self._build(self._largest(config))
        settings = {knob: value for knob, value in asdict(config).items() if knob not in RESERVING}
        engine = engine_beside(built, **settings)
        engine.on_step = seen.append
        async with running(engine) as service:
            yield service

    def _build(self, config: EngineConfig) -> Engine:
        from llmsched.engine.build import build_engine

        if self._built is None or config != self._built_for:
            if self._built is not None:  # both at once might not fit
                cast("TorchExecutor", self._built.executor).close()
                self._built = None
            self._built, self._built_for = build_engine(config, self._progress), config
        return self._built

    def _largest(self, config: EngineConfig) -> EngineConfig:
        """What to build for a variant: with room for the largest limits of all that can share it."""
        from llmsched.engine.build import LIMITS, RESERVING

        def reserving(one: EngineConfig) -> list[Any]:
            return [getattr(one, name) for name in sorted(RESERVING)]

        alike = [one for one in self._configs.values() if reserving(one) == reserving(config)]
        limits = {name: max(getattr(one, name) for one in alike) for name in LIMITS}
        return replace(alike[0], **limits)


def _with_budget(config: EngineConfig) -> EngineConfig:
    """max_num_batched_tokens as it will be: what one variant leaves to the device must not follow from another's."""
    from llmsched.engine.device import device_memory
    from llmsched.engine.kv.budget import token_budget

    return replace(config, max_num_batched_tokens=token_budget(config, device_memory(config.device).kind))


def one_after_the_other(runs: Sequence[Run]) -> Run:
    """Several runs as one: each begins when the one before it has ended."""
    records: list[RequestRecord] = []
    now = 0.0
    for run in runs:
        start = min(record.scheduled for record in run.records)
        moved = [record.moved(now - start, len(records)) for record in run.records]
        now = max((record.end for record in moved if record.end is not None), default=now)
        records += moved
    preempted = [run.preemptions for run in runs if run.preemptions is not None]
    lags = [lag for run in runs for lag in run.loop_lags]
    return Run(records, sum(preempted) if len(preempted) == len(runs) else None, lags, runs[0].own_process)
