"""Benchmarks of engines that are not there: the real scheduler on a virtual clock gives the records of a run.

`simulate_workload(blueprint, load, slo, max_num_batched_tokens=512)` is for all who want figures: a blueprint, made
once, serves any number of loads and settings within what it reserves memory for.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Unpack

from llmsched.cli import render
from llmsched.cli.figures.kv_memory import KVMeter, TargetState, target_state
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.interrupt import interrupted_at_once
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, Encode, TokenizerEncode, WordEncode
from llmsched.cli.load.traces.trace import Content
from llmsched.cli.options.engine import EngineOptions
from llmsched.cli.targets.opening import Opened, Plan
from llmsched.cli.targets.run import Run
from llmsched.cli.targets.sampling import MOST_SAMPLES
from llmsched.cli.targets.virtual import simulate_load
from llmsched.engine.blueprint import Blueprint, gpu_blueprint, local_blueprint
from llmsched.engine.config import EngineConfig, Limits
from llmsched.engine.errors import ConfigError, LlmschedError, ModelError
from llmsched.engine.latency import Slo
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.progress import Progress, silent
from llmsched.engine.simulated_engine import SimulatedEngine
from llmsched.profiles.calibrated import LOCAL

#: Seconds between two samples of a run that is not too long for them.
_SAMPLE_INTERVAL = 0.1


def make_blueprint(
    config: EngineConfig, device: str, progress: Progress = silent, quantization: str | None = None
) -> Blueprint:
    """The engine that `config` would give on a GPU (see gpu_blueprint for names), or with "local" on this machine's.
    With `quantization` its weights are in one of QUANTIZATIONS.

    Raises ModelError and ConfigError, the latter also where this machine was not calibrated for the model.
    """
    if quantization is not None and device == LOCAL:
        raise ConfigError("quantization", "is for a GPU that is simulated; local serves the model as it is")
    planner = open_planner(config.model, progress, quantization=quantization)
    return local_blueprint(planner, config) if device == LOCAL else gpu_blueprint(planner, config, device)


def simulate_workload(
    blueprint: Blueprint,
    workload: Load,
    slo: Slo,
    *,
    timeout: float | None = None,
    progress: Progress = silent,
    **limits: Unpack[Limits],
) -> Measurement:
    """Serve a load on a new engine, with other `limits` than the blueprint's if given, and measure it.

    Raises ConfigError for limits beyond what the blueprint reserves memory for.
    """
    return simulate_run(blueprint.engine(**limits), blueprint.plan, workload, timeout, progress).measure(workload, slo)


def simulate_run(
    engine: SimulatedEngine, plan: MemoryPlan, workload: Load, timeout: float | None, progress: Progress = silent
) -> Run:
    """Serve a load on a new engine with this memory plan. Texts go through the model's tokenizer if it is at hand."""
    planned, ended = workload.plan(COMMON_IDS, TextEncode(engine.config.model)), 0
    total = 0 if workload.stop_after else len(planned)
    watch, meter = _Watch(engine), KVMeter()
    engine.on_step = meter

    def count(record: RequestRecord) -> None:
        nonlocal ended
        ended += 1
        progress("requests", ended, total)

    with interrupted_at_once():
        records = simulate_load(
            planned,
            engine,
            closed=workload.closed,
            max_concurrency=workload.max_concurrency,
            timeout=timeout,
            stop_after=workload.stop_after,
            on_end=count,
            after_step=watch.after_step,
        )
    return Run(records, engine.num_preemptions, None, False, watch.samples, plan.parts, meter=meter)


class TextEncode:
    """Text as the model's tokenizer sees it, which is looked for when the first text comes; words if there is none."""

    def __init__(self, model: str) -> None:
        self._model = model

    def prompt(self, content: Content) -> list[int]:
        return _encoder(self._model).prompt(content)

    def count(self, text: str) -> int:
        return _encoder(self._model).count(text)


@cache
def _encoder(model: str) -> Encode:
    """The tokenizer of a model that is on this disk; of a hub id only config.json is fetched."""
    from llmsched.engine.model.loader import load_tokenizer
    from llmsched.engine.model.source import locate

    path = Path(os.path.expanduser(model))
    try:
        if model == "demo" or path.is_dir() or path.suffix == ".gguf":
            return TokenizerEncode(load_tokenizer(locate(model)))
    except ModelError:
        pass
    render.warn(f"the tokenizer of {model} is not at hand: each word of a text is taken as one token")
    return WordEncode(COMMON_IDS)


class _Watch:
    """Samples an engine's state by its own clock, the further apart the longer a run gets."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.samples: list[TargetState] = []
        self._engine = engine
        self._interval = _SAMPLE_INTERVAL
        self._next = self._interval

    def after_step(self) -> None:
        """Take a sample if it is time to."""
        now = self._engine.now
        if now < self._next:
            return
        scheduler, use = self._engine.scheduler, self._engine.kv_use()
        self.samples.append(target_state(now, len(scheduler.running), len(scheduler.waiting), use))
        if len(self.samples) > MOST_SAMPLES:
            del self.samples[1::2]
            self._interval *= 2
        self._next = now + self._interval


def refuse_warmup(plan: Plan) -> None:
    """Raise LlmschedError where the user asks for warm-up requests."""
    if plan.warmup:
        raise LlmschedError(f"--warmup {plan.warmup}: there is nothing to warm up on a virtual clock; leave it out")


@asynccontextmanager
async def open_simulated(
    model: str, device: str, options: EngineOptions, plan: Plan, progress: Progress, quantization: str | None = None
) -> AsyncIterator[Opened]:
    """A model on a GPU that is not there, as a target like any other. Raises ModelError and ConfigError."""
    refuse_warmup(plan)
    config = options.config(model, {"max_queue_size": max(2048, plan.workload.num_requests)})
    blueprint = make_blueprint(config, device, progress, quantization)
    for note in blueprint.notes:
        render.warn(note)

    async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
        return simulate_workload(blueprint, workload, slo, timeout=plan.timeout, progress=progress)

    yield Opened(
        name=model,
        provenance=blueprint.provenance,
        warmup=0,
        measure=measure,
        settings={name: value for name, value in asdict(blueprint.config).items() if value is not None},
    )
