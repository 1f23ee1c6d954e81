"""`llmsched tune`: find the token budget that serves most and still meets the latency targets."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmsched.cli import render
from llmsched.cli.bench.load import Load
from llmsched.cli.bench.load_options import LoadOptions, with_load_options
from llmsched.cli.bench.options import with_slo_options
from llmsched.cli.options import EngineOptions, ModelArgument, duration, resolve_model, with_engine_options
from llmsched.cli.tune.objective import Setting, Trial, choose
from llmsched.cli.tune.report import as_json, make_profile, show
from llmsched.cli.tune.search import largest_useful, powers_of_two
from llmsched.cli.tune.sweep import EngineRunner, sweep
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import device_memory
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress
from llmsched.profiles.tuned import ProfileError, TunedProfile, profile_path, save_profile

if TYPE_CHECKING:
    from llmsched.engine.service import AsyncEngine

#: Largest step worth trying where no flag says so, by device: beyond it a step only gets longer.
_LARGEST = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Task:
    """What to find out."""

    workload: Load
    slo: Slo
    timeout: float
    rounds: int
    time_limit: float
    smallest: int


@with_engine_options(exclude=("seed",))
@with_slo_options
@with_load_options(num_prompts=16, input_len=128, output_len=32, max_concurrency=4)
def tune(
    model: ModelArgument = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How often each value is measured, in turn.", rich_help_panel="Sweep")
    ] = 2,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            parser=duration,
            metavar="DURATION",
            show_default="3min",
            help="No further round is begun that would not end in this time; the first always is.",
            rich_help_panel="Sweep",
        ),
    ] = 180.0,
    min_num_batched_tokens: Annotated[
        int,
        typer.Option(
            "--min-num-batched-tokens",
            min=1,
            metavar="TOKENS",
            help="Smallest value of the sweep; --max-num-batched-tokens is the largest.",
            rich_help_panel="Sweep",
        ),
    ] = 32,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="NAME|PATH", show_default="the model's name", help="Profile to write."),
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    load_options: LoadOptions,
    slo: Slo,
    engine_options: EngineOptions,
) -> None:
    """Find the token budget that serves most and meets your latency targets.

    Measures max_num_batched_tokens in powers of two under one load (4 requests at a time unless you say otherwise), and
    writes the winner as a profile for `llmsched serve --profile`. Exit code 1 if no value meets the targets.
    """
    task = Task(
        workload=load_options.load,
        slo=slo,
        timeout=load_options.timeout,
        rounds=rounds,
        time_limit=time_limit,
        smallest=min_num_batched_tokens,
    )
    name = resolve_model(model)
    destination = _destination(output, name)
    if not task.slo.given():
        render.note("no SLO given (--slo-ttft, --slo-itl, ...): the most throughput wins, whatever the latency")
    with render.progress_bar() as progress:
        trials, profile = asyncio.run(_tune(_config(name, task, engine_options), task, engine_options, progress))
    written = None if profile is None else _save(profile, destination)
    results = (name, trials, task.workload, task.slo, written)
    if as_json_:
        render.emit_json(as_json(*results))
    else:
        show(*results)
    if profile is None:
        raise typer.Exit(1)


async def _tune(
    config: EngineConfig, task: Task, options: EngineOptions, progress: Progress
) -> tuple[list[Trial], TunedProfile | None]:
    """The trials, and the profile of the best if there is one."""
    runner, engine = await _largest_engine(config, task, options, progress)
    try:
        largest = engine.config.max_num_batched_tokens
        assert largest is not None
        settings = [Setting(tokens, engine.config.max_num_seqs) for tokens in powers_of_two(task.smallest, largest)]
        model, device = engine.model, engine.config.device
        trials = await sweep(
            settings,
            task.rounds,
            runner,
            task.slo,
            time_limit=task.time_limit,
            on_trial=lambda done, total: progress("trials", done, total),
        )
    finally:
        await runner.close()
    if (best := choose(trials)) is None:
        return trials, None
    return trials, make_profile(model, device, trials, best, task.workload, task.slo, options.given)


async def _largest_engine(
    config: EngineConfig, task: Task, options: EngineOptions, progress: Progress
) -> tuple[EngineRunner, AsyncEngine]:
    """An engine for the largest step that fits into memory; a size that the user asked for is never lowered."""
    while True:
        runner = EngineRunner(config, task.workload, task.timeout, progress)
        try:
            return runner, await runner.engine()
        except ConfigError as problem:
            tokens = (config.max_num_batched_tokens or 0) // 2
            if "max_num_batched_tokens" in options.given or tokens < task.smallest:
                raise
            render.note(f"max_num_batched_tokens {2 * tokens} does not fit ({problem}); the sweep ends at {tokens}")
            config = replace(config, max_num_batched_tokens=tokens)


def _config(model: str, task: Task, options: EngineOptions) -> EngineConfig:
    """The engine for the largest step of the sweep; every trial is within what it reserves."""
    workload = task.workload
    kind = device_memory(options.given.get("device", "auto")).kind
    useful = largest_useful(workload.max_concurrency or workload.num_requests, workload.longest_input)
    largest = max(task.smallest, min(_LARGEST[kind], useful))
    return options.config(
        model, {"max_num_batched_tokens": largest, "max_queue_size": max(2048, workload.num_requests)}
    )


def _destination(output: str | None, model: str) -> str:
    """Where the profile goes; checked before the work, not after it."""
    destination = output or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip("-.") or "tuned"
    try:
        profile_path(destination)
    except ProfileError as problem:
        raise LlmschedError(f"--output: {problem}") from problem
    return destination


def _save(profile: TunedProfile, destination: str) -> Path:
    try:
        return save_profile(profile, destination)
    except ProfileError as problem:
        raise LlmschedError(f"--output: {problem}") from problem
