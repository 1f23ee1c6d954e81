"""Variants on engines in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

from llmsched.cli.bench.compare.comparison import Done, Task
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import usable_ids
from llmsched.cli.targets.engine_target import EngineTarget, running
from llmsched.cli.targets.load_run import send_workload, warm_up
from llmsched.engine.config import EngineConfig
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance

if TYPE_CHECKING:
    from llmsched.engine.core import Engine
    from llmsched.engine.executor.torch_executor import TorchExecutor
    from llmsched.engine.service import AsyncEngine


class Engines:
    """Engines of several settings, one at a time. Those that need the same memory share what is loaded once."""

    def __init__(self, configs: Mapping[str, EngineConfig], progress: Progress) -> None:
        """Raises ConfigError for a device that is not there."""
        self._configs = {name: _with_budget(config) for name, config in configs.items()}
        self._progress = progress
        self._built: Engine | None = None
        self._built_for: EngineConfig | None = None

    def check(self) -> None:
        """Raise ConfigError or ModelError, before the first run and not after it, for what cannot be built."""
        from llmsched.engine.architecture.dtypes import check_servable
        from llmsched.engine.blueprint import resolve
        from llmsched.engine.device import device_memory, resolve_device
        from llmsched.engine.memory.planner import open_planner

        configs = list(self._configs.values())
        for config in configs:
            check_servable(config)
        planner = open_planner(configs[0].model, self._progress)
        for config in configs:
            resolve(planner, self._largest(config), device_memory(resolve_device(config.device)))

    async def __call__(self, name: str, workload: Load, task: Task, progress: Progress) -> Done:
        """See `Perform`. Raises ModelError and ConfigError."""
        async with self.running(name) as engine:
            ids, target = usable_ids(engine.tokenizer, engine.model.vocab_size), EngineTarget(engine)
            await warm_up(target, workload, task.warmup, ids=ids, timeout=task.timeout)
            await engine.reset_prefix_cache()
            run = await send_workload(target, workload, ids=ids, timeout=task.timeout, progress=progress)
            settings = {knob: value for knob, value in asdict(engine.config).items() if value is not None}
            assert engine.plan is not None
            experiment = Experiment(
                target.name, Provenance("in process"), task.workload, task.slo, task.warmup, settings
            )
            return Done(run, experiment, engine.plan)

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[AsyncEngine]:
        """A new engine with the settings of that name, started; stopped when the block ends."""
        from llmsched.engine.build import RESERVING, engine_beside

        config = self._configs[name]
        built = self._build(self._largest(config))
        settings = {knob: value for knob, value in asdict(config).items() if knob not in RESERVING}
        async with running(engine_beside(built, **settings)) as service:
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
    from llmsched.engine.memory.budget import token_budget

    return replace(config, max_num_batched_tokens=token_budget(config, device_memory(config.device).kind))
