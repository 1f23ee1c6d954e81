"""Variants on a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from llmsched.cli import render
from llmsched.cli.bench.compare.comparison import Done, Task
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.load.load import Load
from llmsched.cli.targets.simulated_target import make_blueprint, simulate_run
from llmsched.engine.config import EngineConfig
from llmsched.engine.progress import Progress


class Blueprints:
    """Engines of several settings that are not there, on the device of that name (see `make_blueprint`)."""

    def __init__(
        self, configs: Mapping[str, EngineConfig], device: str, progress: Progress, quantization: str | None = None
    ) -> None:
        """Raises ModelError, and ConfigError for what does not fit the device."""
        self._blueprints = {
            name: make_blueprint(config, device, progress, quantization) for name, config in configs.items()
        }
        for note in dict.fromkeys(note for one in self._blueprints.values() for note in one.notes):
            render.warn(note)

    async def __call__(self, name: str, workload: Load, task: Task, progress: Progress) -> Done:
        """See `Perform`."""
        blueprint = self._blueprints[name]
        run = simulate_run(blueprint.engine(), blueprint.plan, workload, task.timeout, progress, render.warn)
        settings = {knob: value for knob, value in asdict(blueprint.config).items() if value is not None}
        experiment = Experiment(blueprint.config.model, blueprint.provenance, task.workload, task.slo, engine=settings)
        return Done(run, experiment, blueprint.plan)
