from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import psutil

from llmsched.cli.figures.engine_counts import EngineCounts
from llmsched.cli.figures.kv_memory import KVMeter
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import RunRecord
from llmsched.cli.load.load import Load, plan_first
from llmsched.cli.load.prompts import COMMON_IDS, TextEncoder, TokenizerEncoder, WordEncoder, usable_ids
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.engine_target import EngineTarget, running, until_idle
from llmsched.cli.targets.load_run import run_workload, warm_up
from llmsched.cli.targets.simulated_clients import SimulatedClients
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.cli.tune.trial_runs import Predictions, TrialRun, TrialRunner, run_of
from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import ObservedExecutor, StepPlan, StepResult
from llmsched.engine.executor.cost import StepShape, StepTimeModel, shape_of
from llmsched.engine.goodput import Slo
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.progress import Progress, silent
from llmsched.engine.simulated_engine import SimulatedEngine

if TYPE_CHECKING:
    from llmsched.engine.async_engine import AsyncEngine
    from llmsched.engine.core import Engine

_WARMUP_OUTPUT_LEN = 4
#: The step-time model is fitted to the latest steps: at most _MAX_STEPS of them, and at least _MIN_STEPS.
_MAX_STEPS, _MIN_STEPS = 4096, 32


class TrialLoad(NamedTuple):
    """Load that an engine serves in each trial, and the SLOs that it should meet."""

    load: Load
    slo: Slo
    timeout: float  # seconds per request
    ids: Sequence[int] = COMMON_IDS  # tokens of random prompts
    encode: TextEncoder = WordEncoder(COMMON_IDS)  # turns the texts of a trace into token ids

    def at_rate(self, rate: float | None, requests: int) -> TrialLoad:
        """Return an open loop of at least `requests` requests at `rate`, or this load if `rate` is None."""
        if rate is None:
            return self
        load = self.load.at_rate(rate)
        if self.load.closed:
            load = replace(load, max_concurrency=None)
        if isinstance(load, SyntheticLoad) and load.num_prompts is not None:
            load = replace(load, num_prompts=max(load.num_prompts, requests))
        return self._replace(load=load)


class EngineRunner(TrialRunner):
    """TrialRunner on one engine, which is reconfigured between runs and rebuilt only if it has failed.

    Every run starts with an empty prefix cache. The prompts are the same for all settings of a round, and new in each
    round. `predict(...)` stops at `deadline`, a time on the clock of time.monotonic().
    """

    deadline = math.inf

    def __init__(self, config: EngineConfig, work: TrialLoad, progress: Progress) -> None:
        self._config = config
        self._work = work
        self._progress = progress
        self._stack = AsyncExitStack()
        self._engine: AsyncEngine | None = None
        self._watch: StepWatch | None = None
        self._warm: set[Setting] = set()
        self._process = psutil.Process()

    async def engine(self) -> AsyncEngine:
        """Return the engine. Build it on the first call and after it has failed. Raises ModelError and ConfigError."""
        if self._engine is not None and not self._engine.healthy:
            await self.close()
        if self._engine is None:
            from llmsched.engine.build import build_engine

            engine = build_engine(self._config, self._progress)
            self._watch = StepWatch(engine)
            self._engine = await self._stack.enter_async_context(running(engine))
            ids = usable_ids(engine.tokenizer, engine.model.vocab_size)
            self._work = self._work._replace(ids=ids, encode=TokenizerEncoder(engine.tokenizer))
            self._warm.clear()
        return self._engine

    async def close(self) -> None:
        self._engine = None
        await self._stack.aclose()

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        engine = await self.engine()
        work = self._work.at_rate(rate, requests)
        assert self._watch is not None
        start = asyncio.get_running_loop().time()
        await until_idle(engine)
        await engine.call(lambda core: core.reconfigure(**asdict(setting)))
        target = EngineTarget(engine)
        if setting not in self._warm:
            await warm_up(target, work.load, 1, ids=work.ids, timeout=work.timeout, output_len=_WARMUP_OUTPUT_LEN)
            self._warm.add(setting)
        await engine.call(lambda core: core.prefixes.reset())
        self._watch.peak_running = 0
        others_cpu(self._process)
        figures = await run_workload(
            target,
            work.load.with_seed(work.load.seed + round_index),
            work.slo,
            ids=work.ids,
            timeout=work.timeout,
            progress=silent,
            first=requests,
        )
        seconds = asyncio.get_running_loop().time() - start
        run = run_of(setting, round_index, requests, figures, self._watch.peak_running, seconds)
        return replace(run, others_cpu=others_cpu(self._process))

    def predict(self, settings: Sequence[Setting], requests: int, rate: float | None = None) -> Predictions:
        """Return simulated runs of the settings, or no runs if too few steps were recorded to fit a cost model."""
        cost = None if self._watch is None else self._watch.cost()
        if self._engine is None or self._engine.core.plan is None or cost is None:
            return {}
        plan = self._engine.core.plan
        config = replace(self._engine.core.config, swap_space=0, preemption_mode="recompute")
        new_kv = partial(make_kv, config, plan.num_blocks, layout=plan.layout)
        runner = SimulatedRunner(lambda: SimulatedEngine(config, new_kv(), cost), self._work, self.deadline)
        runs: dict[Setting, TrialRun] = {}
        with suppress(OutOfTimeError):
            for setting in settings:
                runs[setting] = runner.simulate(setting, requests, 0, rate)
        return runs


class SimulatedRunner(TrialRunner):
    """TrialRunner on a virtual clock. Each run gets a new engine from `make_engine()`.

    Every round sends the same prompts, so a run of the whole load has the same figures as `bench --simulate`. A run
    raises OutOfTimeError if it is not complete at `deadline`, a time on the clock of time.monotonic().
    """

    def __init__(self, make_engine: Callable[[], SimulatedEngine], work: TrialLoad, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._make_engine = make_engine
        self._work = work

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        return self.simulate(setting, requests, round_index, rate)

    def simulate(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        """Do the work of `run(...)` synchronously. Raises ConfigError for a setting above the memory plan's limits."""
        start, work, engine = time.perf_counter(), self._work.at_rate(rate, requests), self._make_engine()
        engine.reconfigure(**asdict(setting))
        meter, peak_running = KVMeter(), 0

        def note_step(usage: KVUsage) -> None:
            nonlocal peak_running
            if time.monotonic() >= self.deadline:
                raise OutOfTimeError
            meter(usage)
            peak_running = max(peak_running, len(engine.scheduler.running))

        engine.on_step = note_step
        planned, stop_after = plan_first(work.load, requests, work.ids, work.encode)
        clients = SimulatedClients(
            planned,
            [engine],
            closed=work.load.closed,
            max_concurrency=work.load.max_concurrency,
            timeout=work.timeout,
            stop_after=stop_after,
        )
        run = RunRecord(clients.run(), EngineCounts(engine.scheduler.counters.num_preemptions), meter=meter)
        figures = measure(run, work.load, work.slo)
        return run_of(setting, round_index, requests, figures, peak_running, time.perf_counter() - start)


def others_cpu(this: psutil.Process) -> float:
    """Return the share of the machine's CPU time that processes other than `this` used since the last call."""
    own: float = this.cpu_percent() / (psutil.cpu_count() or 1)
    all_cores: float = psutil.cpu_percent()
    return max(0.0, all_cores - own) / 100


class StepWatch:
    """Observer of an engine's executor, which records the shape and time of each step.

    `peak_running` is the largest number of requests in a step since `peak_running` was last set to 0.
    """

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self._steps: deque[tuple[StepShape, float]] = deque(maxlen=_MAX_STEPS)
        self._gaps: deque[float] = deque(maxlen=_MAX_STEPS)
        self._end: float | None = None
        self.peak_running = 0
        engine.executor = ObservedExecutor(engine.executor, self._record)

    def _record(self, plan: StepPlan, result: StepResult) -> None:
        now = time.perf_counter()
        self.peak_running = max(self.peak_running, len(self._scheduler.running))
        if self._end is not None:
            self._gaps.append(max(0.0, now - self._end - result.elapsed))
        self._end = now
        self._steps.append((shape_of(plan), result.elapsed - result.swap_elapsed))

    def cost(self) -> LearnedCost | None:
        """Fit a cost model to the recorded steps. Return None if there are too few steps."""
        if len(self._steps) < _MIN_STEPS:
            return None
        model = StepTimeModel()
        for shape, seconds in self._steps:
            model.learn(shape, seconds)
        return LearnedCost(model, median(self._gaps))


class LearnedCost(NamedTuple):
    """StepCost fitted to the recorded steps of an engine."""

    model: StepTimeModel
    overhead: float  # seconds between two steps
    window: int | None = None

    def seconds(self, shape: StepShape) -> float:
        return self.overhead + self.model.predict(shape)
