from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

from llmsched.cli import render
from llmsched.cli.bench.compare.comparison import RunVariant, VariantRun
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import usable_ids
from llmsched.cli.targets.engine_target import EngineTarget, running
from llmsched.cli.targets.interface import RunPlan
from llmsched.cli.targets.load_run import send_workload, warm_up
from llmsched.cli.targets.simulated_replicas import Replication
from llmsched.cli.targets.simulated_target import make_blueprint, simulate_run
from llmsched.engine.config import LIMITS, EngineConfig
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance

if TYPE_CHECKING:
    from llmsched.engine.async_engine import AsyncEngine
    from llmsched.engine.core import Engine
    from llmsched.engine.executor.torch_executor import TorchExecutor


class VariantEngines:
    """Engines in this process, one per variant. Variants that need the same memory share weights and KV memory."""

    def __init__(self, configs: Mapping[str, EngineConfig], plan: RunPlan, progress: Progress) -> None:
        """Raise ConfigError if this machine lacks the device of a variant."""
        from llmsched.engine.device import device_memory
        from llmsched.engine.memory.planner import token_budget

        # The default depends on the variant's device.
        budgets = {name: token_budget(one, device_memory(one.device).kind) for name, one in configs.items()}
        self._configs = {name: replace(one, max_num_batched_tokens=budgets[name]) for name, one in configs.items()}
        self._plan = plan
        self._progress = progress
        self._built: Engine | None = None
        self._built_for: EngineConfig | None = None

    def check(self) -> None:
        """Raise ConfigError or ModelError if the engine of a variant cannot be built."""
        from llmsched.engine.architecture.dtypes import check_kv_dtype
        from llmsched.engine.device import device_memory, resolve_device
        from llmsched.engine.memory.planner import open_planner

        configs = list(self._configs.values())
        planner = open_planner(configs[0].model, self._progress)
        for config in configs:
            device = device_memory(resolve_device(config.device))
            resolved, _ = planner.resolve(self._largest(config), device)
            check_kv_dtype(resolved.kv_cache_dtype, device)

    async def __call__(self, name: str, workload: Load, progress: Progress) -> VariantRun:
        """Run a load with the variant `name`. Raises ModelError or ConfigError if its engine cannot be built."""
        async with self.running(name) as engine:
            ids, target = usable_ids(engine.core.tokenizer, engine.core.model.vocab_size), EngineTarget(engine)
            plan, warmup = self._plan, 1 if self._plan.warmup is None else self._plan.warmup
            await warm_up(target, workload, warmup, ids=ids, timeout=plan.timeout)
            await engine.call(lambda core: core.prefixes.reset())
            run = await send_workload(target, workload, ids=ids, timeout=plan.timeout, progress=progress)
            assert engine.core.plan is not None
            parts, measured = engine.core.plan.parts, engine.core.plan.measured
            if measured is not None and measured.activations is not None:
                parts = parts._replace(activations=measured.activations)
            origin = Provenance("in process")
            experiment = Experiment(target.name, origin, plan.workload, plan.slo, warmup, engine.core.config.chosen())
            return VariantRun(replace(run, memory=parts), experiment)

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[AsyncEngine]:
        """Yield a new, running engine with the settings of the variant `name`."""
        from llmsched.engine.build import RESERVING, build_engine, engine_beside

        config = self._configs[name]
        largest = self._largest(config)
        if self._built is None or largest != self._built_for:
            if self._built is not None:  # both at once might not fit
                cast("TorchExecutor", self._built.executor).close()
                self._built = None
            self._built, self._built_for = build_engine(largest, self._progress), largest
        settings = {knob: value for knob, value in asdict(config).items() if knob not in RESERVING}
        async with running(engine_beside(self._built, **settings)) as service:
            yield service

    def _largest(self, config: EngineConfig) -> EngineConfig:
        """Return engine settings with enough memory for all variants that can share memory with `config`."""
        from llmsched.engine.build import RESERVING

        def reserving(one: EngineConfig) -> list[Any]:
            return [getattr(one, name) for name in sorted(RESERVING)]

        alike = [one for one in self._configs.values() if reserving(one) == reserving(config)]
        limits = {name: max(getattr(one, name) for one in alike) for name in LIMITS}
        return replace(alike[0], **limits)


def simulated_variants(
    configs: Mapping[str, EngineConfig],
    device: str,
    plan: RunPlan,
    progress: Progress,
    quantization: str | None,
    replication: Replication,
) -> RunVariant:
    """Return a function that simulates a variant's run on `device`. Raises ModelError or ConfigError."""
    blueprints = {
        name: replication.of(make_blueprint(config, device, progress, quantization)) for name, config in configs.items()
    }
    for note in dict.fromkeys(note for one in blueprints.values() for note in one.notes):
        render.warn(note)

    async def run_variant(name: str, workload: Load, progress: Progress) -> VariantRun:
        blueprint = blueprints[name]
        run = simulate_run(
            blueprint, workload, timeout=plan.timeout, progress=progress, warn=render.warn, replication=replication
        )
        chosen = blueprint.config.chosen()
        experiment = Experiment(blueprint.config.model, blueprint.provenance, plan.workload, plan.slo, engine=chosen)
        return VariantRun(run, experiment)

    return run_variant
