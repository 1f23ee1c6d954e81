"""Benchmarks of engines that are not there: the real scheduler on a virtual clock gives the records of a run.

`simulate_workload(blueprint, load, slo, max_num_batched_tokens=512)` is for all who want figures: a blueprint, made
once, serves any number of loads and settings within what it reserves memory for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Unpack

from llmsched.cli import render
from llmsched.cli.bench.load import Load
from llmsched.cli.bench.measure import Measurement, measure
from llmsched.cli.bench.prompts import COMMON_IDS, WordEncode
from llmsched.cli.bench.record import RequestRecord
from llmsched.cli.bench.targets import Opened, Plan
from llmsched.cli.bench.virtual import simulate_load
from llmsched.cli.options import EngineOptions
from llmsched.engine.blueprint import Blueprint, gpu_blueprint, local_blueprint
from llmsched.engine.config import EngineConfig, Limits
from llmsched.engine.errors import LlmschedError
from llmsched.engine.kv.draft import open_draft
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress, silent

#: What --simulate takes for the device of this machine.
LOCAL = "local"


def make_blueprint(config: EngineConfig, device: str, progress: Progress = silent) -> Blueprint:
    """The engine that `config` would give on the GPU of that name, or with "local" on this machine's device.

    Raises ModelError and ConfigError, the latter also where this machine was not calibrated for the model.
    """
    draft = open_draft(config.model, progress)
    return local_blueprint(draft, config) if device == LOCAL else gpu_blueprint(draft, config, device)


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
    engine, planned, ended = blueprint.engine(**limits), workload.plan(COMMON_IDS, WordEncode(COMMON_IDS)), 0

    def count(record: RequestRecord) -> None:
        nonlocal ended
        ended += 1
        progress("requests", ended, len(planned))

    records = simulate_load(
        planned,
        engine,
        closed=workload.closed,
        max_concurrency=workload.max_concurrency,
        timeout=timeout,
        stop_after=workload.stop_after,
        on_end=count,
    )
    return measure(records, workload, slo, preemptions=engine.num_preemptions)


@asynccontextmanager
async def open_simulated(
    model: str, device: str, options: EngineOptions, plan: Plan, progress: Progress
) -> AsyncIterator[Opened]:
    """A model on a GPU that is not there, as a target like any other. Raises ModelError and ConfigError."""
    if plan.warmup:
        raise LlmschedError(f"--warmup {plan.warmup}: there is nothing to warm up on a virtual clock; leave it out")
    config = options.config(model, {"max_queue_size": max(2048, plan.workload.num_requests)})
    blueprint = make_blueprint(config, device, progress)
    for note in blueprint.notes:
        render.warn(note)

    async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
        return simulate_workload(blueprint, workload, slo, timeout=plan.timeout, progress=progress)

    yield Opened(
        name=model,
        where=blueprint.plan.device.name,
        warmup=0,
        measure=measure,
        settings={name: value for name, value in asdict(blueprint.config).items() if value is not None},
        measured=False,
        calibration_error=blueprint.calibration_error,
        published_error=blueprint.published_error,
    )
