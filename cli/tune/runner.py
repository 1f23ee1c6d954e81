"""Measuring settings on an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from llmsched.cli.load.prompts import TokenizerEncode, usable_ids
from llmsched.cli.targets.engine_target import EngineTarget, running, until_idle
from llmsched.cli.targets.load_run import run_workload, warm_up
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.simulated_runner import TrialLoad, simulated_run
from llmsched.cli.tune.trial_runs import TrialRun, run_of
from llmsched.cli.tune.watch import StepWatch
from llmsched.engine.config import EngineConfig
from llmsched.engine.progress import Progress, silent
from llmsched.engine.simulated_engine import SimulatedEngine

if TYPE_CHECKING:
    from llmsched.engine.core import Engine
    from llmsched.engine.service import AsyncEngine

_WARMUP_OUTPUT_LEN = 4


def build_engine(config: EngineConfig, progress: Progress) -> Engine:
    """See llmsched.engine.build, which takes a while to import."""
    from llmsched.engine.build import build_engine as build

    return build(config, progress)


class EngineRunner:
    """A TrialRunner on one engine that is reconfigured between runs, and built anew only if it died.

    Every run starts with an empty prefix cache, so none gains from the prompts of another.
    """

    def __init__(self, config: EngineConfig, asked: TrialLoad, progress: Progress) -> None:
        self._config = config
        self._asked = asked
        self._progress = progress
        self._stack = AsyncExitStack()
        self._engine: AsyncEngine | None = None
        self._watch: StepWatch | None = None
        self._warm: set[Setting] = set()

    async def engine(self) -> AsyncEngine:
        """The engine, built if there is none that works. Raises ModelError and ConfigError."""
        if self._engine is not None and not self._engine.healthy:
            await self.close()
        if self._engine is None:
            engine = build_engine(self._config, self._progress)
            self._watch = StepWatch(engine)
            self._engine = await self._stack.enter_async_context(running(engine))
            ids = usable_ids(engine.tokenizer, engine.model.vocab_size)
            self._asked = self._asked._replace(ids=ids, encode=TokenizerEncode(engine.tokenizer))
            self._warm.clear()
        return self._engine

    async def close(self) -> None:
        self._engine = None
        await self._stack.aclose()

    async def run(self, setting: Setting, requests: int, round_index: int) -> TrialRun:
        engine, asked = await self.engine(), self._asked
        assert self._watch is not None
        start = asyncio.get_running_loop().time()
        await until_idle(engine)
        await engine.call(lambda core: core.reconfigure(**setting.limits()))
        target = EngineTarget(engine)
        if setting not in self._warm:
            await warm_up(target, asked.load, 1, ids=asked.ids, timeout=asked.timeout, output_len=_WARMUP_OUTPUT_LEN)
            self._warm.add(setting)
        await engine.call(lambda core: core.prefixes.reset())
        self._watch.reset()
        load = asked.portion(requests, round_index)
        figures = await run_workload(target, load, asked.slo, ids=asked.ids, timeout=asked.timeout, progress=silent)
        seconds = asyncio.get_running_loop().time() - start
        return run_of(setting, round_index, requests, figures, demand=self._watch.demand(), seconds=seconds)

    def predict(self, settings: Sequence[Setting], requests: int) -> Mapping[Setting, TrialRun]:
        """Simulated with what the steps so far took. Preempted requests are taken to be recomputed."""
        cost = None if self._watch is None else self._watch.cost()
        if self._engine is None or self._engine.core.plan is None or cost is None:
            return {}
        config = replace(self._engine.core.config, swap_space=0, preemption_mode="recompute")
        plan = self._engine.core.plan
        return {
            setting: simulated_run(
                SimulatedEngine(config, plan.num_blocks, cost, layout=plan.layout), setting, requests, 0, self._asked
            )
            for setting in settings
        }
