from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Unpack

from llmsched.cli.figures.engine_counts import EngineCounts, scheduler_counts
from llmsched.cli.figures.kv_memory import KVMeter, TargetState, target_state
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.measure import measure as measure_run
from llmsched.cli.figures.record import RequestRecord, RunRecord
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, TextEncoder, WordEncoder, load_encoder
from llmsched.cli.load.traces.trace import Content
from llmsched.cli.targets.interface import OpenTarget, RunPlan
from llmsched.cli.targets.load_run import MOST_SAMPLES
from llmsched.cli.targets.simulated_clients import SimulatedClients, to_first_engine
from llmsched.cli.targets.simulated_replicas import ONE_REPLICA, Replication, SimulatedRouter
from llmsched.engine.blueprint import Blueprint, gpu_blueprint, local_blueprint
from llmsched.engine.config import EngineConfig, Limits
from llmsched.engine.errors import ConfigError, LlmschedError, setting
from llmsched.engine.goodput import Slo
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.progress import Progress, silent
from llmsched.engine.simulated_engine import SimulatedEngine
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
    if config.lora:
        raise ConfigError("lora", "has no effect on the simulated time of a step; leave it out")
    planner = open_planner(config.model, progress, quantization=quantization)
    return local_blueprint(planner, config) if device == LOCAL else gpu_blueprint(planner, config, device)


def simulate_run(
    blueprint: Blueprint,
    workload: Load,
    *,
    timeout: float | None = None,
    progress: Progress = silent,
    warn: Warn = no_warning,
    replication: Replication = ONE_REPLICA,
    **limits: Unpack[Limits],
) -> RunRecord:
    """Serve a load on new engines of `blueprint` in virtual time, and return the record of the run.

    `limits` replace the blueprint's limits, such as max_num_seqs. `timeout` is in seconds of virtual time per request.
    `warn` is called if the model's tokenizer is not on this disk. Raises ConfigError if the limits exceed the
    blueprint's memory reservation.
    """
    engines = [blueprint.engine(**limits) for _ in range(replication.replicas)]
    router = SimulatedRouter(engines, replication.router, workload.seed) if len(engines) > 1 else None
    planned, ended = workload.plan(COMMON_IDS, TextEncode(blueprint.config.model, warn)), 0
    total = 0 if workload.stop_after else len(planned)
    # A meter must observe every step, but a simulation of several replicas skips uneventful steps.
    meter = KVMeter() if router is None else None
    engines[0].on_step = meter
    samples, before = _Samples(engines), _counts(engines)

    def count(record: RequestRecord) -> None:
        nonlocal ended
        ended += 1
        if router is not None:
            router.ended(record)
        progress("requests", ended, total)

    with _interrupted_at_once(), _uncollected():
        clients = SimulatedClients(
            planned,
            engines,
            closed=workload.closed,
            max_concurrency=workload.max_concurrency,
            timeout=timeout,
            stop_after=workload.stop_after,
            route=to_first_engine if router is None else router.route,
            on_end=count,
        )
        records = clients.run(samples.take)
    counts = _counts(engines).since(before)
    return RunRecord(records, counts, None, False, samples.taken, blueprint.plan.parts, meter=meter)


def _counts(engines: Sequence[SimulatedEngine]) -> EngineCounts:
    return EngineCounts.sum([scheduler_counts(engine.scheduler) for engine in engines])


class _Samples:
    """Samples of the state of all engines together, at most MOST_SAMPLES."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self.taken: list[TargetState] = []
        self._engines = engines
        self._interval = self._next = _SAMPLE_INTERVAL

    def take(self, now: float) -> None:
        """Take a sample at the time `now` if one is due."""
        if now < self._next:
            return
        for engine in self._engines:
            engine.catch_up(now)
        schedulers = [engine.scheduler for engine in self._engines]
        usage = KVUsage(*map(sum, zip(*(scheduler.kv_usage() for scheduler in schedulers), strict=True)))
        running, waiting = (sum(len(getattr(s, name)) for s in schedulers) for name in ("running", "waiting"))
        self.taken.append(target_state(now, running, waiting, usage))
        if len(self.taken) > MOST_SAMPLES:
            del self.taken[1::2]
            self._interval *= 2
        self._next = now + self._interval


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


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off the search for garbage in the block. A simulation makes millions of objects, but hardly any cycles."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    replication: Replication = ONE_REPLICA,
) -> AsyncIterator[OpenTarget]:
    """Make a blueprint (see `make_blueprint`) and yield it as a target. Raises LlmschedError if `plan` has warm-ups."""
    refuse_warmup(plan)
    blueprint = replication.of(make_blueprint(config, device, progress, quantization))
    for note in blueprint.notes:
        warn(note)

    async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
        run = simulate_run(
            blueprint, workload, timeout=plan.timeout, progress=progress, warn=warn, replication=replication
        )
        return measure_run(run, workload, slo)

    yield OpenTarget(config.model, blueprint.provenance, 0, measure, blueprint.config.chosen())
