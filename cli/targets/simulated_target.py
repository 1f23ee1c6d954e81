from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Unpack

from llmsched.cli.figures.kv_memory import KVMeter, TargetState, target_state
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.measure import measure as measure_run
from llmsched.cli.figures.record import RequestRecord, RunRecord
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, TextEncoder, WordEncoder, load_encoder
from llmsched.cli.load.traces.trace import Content
from llmsched.cli.targets.interface import OpenTarget, RunPlan
from llmsched.cli.targets.load_run import MOST_SAMPLES
from llmsched.cli.targets.simulated_clients import SimulatedClients
from llmsched.engine.blueprint import Blueprint, gpu_blueprint, local_blueprint
from llmsched.engine.config import EngineConfig, Limits
from llmsched.engine.errors import ConfigError, LlmschedError, setting
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.progress import Progress, silent
from llmsched.profiles.calibrated import LOCAL

#: Callback for a warning to the user.
Warn = Callable[[str], None]

#: Seconds between two samples, until a run has more than MOST_SAMPLES.
_SAMPLE_INTERVAL = 0.1


def no_warning(text: str) -> None: ...


def make_blueprint(
    config: EngineConfig, device: str, progress: Progress = silent, quantization: str | None = None
) -> Blueprint:
    """Return the blueprint of an engine on the GPU `device`, or on this machine if `device` is "local".

    `quantization` is the format of the weights (None: the model's own). Raises ModelError if the model cannot be read,
    and ConfigError for a bad setting or if "local" was not calibrated with this model.
    """
    if quantization is not None and device == LOCAL:
        raise ConfigError("quantization", "applies to a simulated GPU; local serves the model as it is")
    planner = open_planner(config.model, progress, quantization=quantization)
    return local_blueprint(planner, config) if device == LOCAL else gpu_blueprint(planner, config, device)


def simulate_run(
    blueprint: Blueprint,
    workload: Load,
    *,
    timeout: float | None = None,
    progress: Progress = silent,
    warn: Warn = no_warning,
    **limits: Unpack[Limits],
) -> RunRecord:
    """Serve a load on a new engine of `blueprint` in virtual time, and return the record of the run.

    `limits` replace the blueprint's limits, such as max_num_seqs. `timeout` is in seconds of virtual time per request.
    `warn` is called if the model's tokenizer is not on this disk. Raises ConfigError if the limits exceed the
    blueprint's memory reservation.
    """
    engine = blueprint.engine(**limits)
    planned, ended = workload.plan(COMMON_IDS, TextEncode(blueprint.config.model, warn)), 0
    total = 0 if workload.stop_after else len(planned)
    engine.on_step = meter = KVMeter()
    samples: list[TargetState] = []
    interval = next_sample = _SAMPLE_INTERVAL

    def sample() -> None:
        nonlocal interval, next_sample
        if (now := engine.clock.now) < next_sample:
            return
        scheduler, usage = engine.scheduler, engine.scheduler.kv_usage()
        samples.append(target_state(now, len(scheduler.running), len(scheduler.waiting), usage))
        if len(samples) > MOST_SAMPLES:
            del samples[1::2]
            interval *= 2
        next_sample = now + interval

    def count(record: RequestRecord) -> None:
        nonlocal ended
        ended += 1
        progress("requests", ended, total)

    with _interrupted_at_once():
        clients = SimulatedClients(
            planned,
            engine,
            closed=workload.closed,
            max_concurrency=workload.max_concurrency,
            timeout=timeout,
            stop_after=workload.stop_after,
            on_end=count,
        )
        records = clients.run(sample)
    preemptions, parts = engine.scheduler.counters.num_preemptions, blueprint.plan.parts
    return RunRecord(records, preemptions, None, False, samples, parts, meter=meter)


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt in the block. asyncio's cancellation would have to wait for an await."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True, slots=True)
class TextEncode:
    """Encoder of texts with the tokenizer of `model`, which is loaded when the first text is encoded."""

    model: str
    warn: Warn = no_warning

    def prompt(self, content: Content) -> list[int]:
        return _encoder(self.model, self.warn).prompt(content)

    def count(self, text: str) -> int:
        return _encoder(self.model, self.warn).count(text)


@cache
def _encoder(model: str, warn: Warn) -> TextEncoder:
    """Return the encoder of texts for a model. Without its tokenizer, call `warn` and count each word as one token."""
    path = Path(os.path.expanduser(model))
    with suppress(ConfigError):
        if model == "demo" or path.is_dir() or path.suffix == ".gguf":
            return load_encoder(model)
    warn(f"the tokenizer of {model} is not on this disk: each word of a text counts as one token")
    return WordEncoder(COMMON_IDS)


def refuse_warmup(plan: RunPlan) -> None:
    """Raise LlmschedError if the user asks for warm-up requests, which have no effect in a simulation."""
    if plan.warmup:
        raise LlmschedError(f"{setting('warmup')} {plan.warmup}: there is nothing to warm up on a virtual clock")


@asynccontextmanager
async def open_simulated(
    config: EngineConfig,
    device: str,
    plan: RunPlan,
    progress: Progress,
    warn: Warn = no_warning,
    quantization: str | None = None,
) -> AsyncIterator[OpenTarget]:
    """Make a blueprint (see `make_blueprint`) and yield it as a target. Raises LlmschedError if `plan` has warm-ups."""
    refuse_warmup(plan)
    blueprint = make_blueprint(config, device, progress, quantization)
    for note in blueprint.notes:
        warn(note)

    async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
        run = simulate_run(blueprint, workload, timeout=plan.timeout, progress=progress, warn=warn)
        return measure_run(run, workload, slo)

    yield OpenTarget(config.model, blueprint.provenance, 0, measure, blueprint.config.chosen())
