"""`llmsched kv-budget`: KV memory and how many sequences it serves, by the same plan that `serve` allocates by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmsched.cli import render
from llmsched.cli.kv_budget import all_gpus as compare
from llmsched.cli.kv_budget import json_document as document
from llmsched.cli.kv_budget import simulated_serving as simulated
from llmsched.cli.kv_budget import text_report as report
from llmsched.cli.kv_budget.analysis import Findings
from llmsched.cli.kv_budget.other_engines import Target, command_line
from llmsched.cli.options.engine_flags import MEMORY_KNOBS, EngineOptions, with_engine_options
from llmsched.cli.options.flags import ModelArgument, quantization_option, resolve_model, typed
from llmsched.cli.values import MOST_TOKENS, size, tokens
from llmsched.engine.architecture.weights import Weights
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory, device_memory, gpu_device
from llmsched.engine.errors import ConfigError, setting
from llmsched.engine.memory.changes import MemoryDemand, config_for_demand, longest_context
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.model.support import refusal
from llmsched.engine.units import human_bytes
from llmsched.profiles.calibrated import LOCAL
from llmsched.profiles.gpus import GpuSpec, find_gpu, gpus
from llmsched.profiles.toml_files import UnknownNameError

if TYPE_CHECKING:
    from llmsched.engine.memory.concurrency import LengthDistribution

KNOBS = (*MEMORY_KNOBS, "headroom", "max_headroom")
_ALL = "all"
_MAX_CV = 10.0
_QUESTION = "Question"


@with_engine_options(only=KNOBS)
def kv_budget(
    model: ModelArgument = None,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|all", help="Plan for this GPU instead of the one here (l4, h100, ...); all compares them."
        ),
    ] = None,
    gpu_memory: Annotated[
        int | None,
        typer.Option(parser=typed(size), metavar="SIZE", help="Plan for a GPU with this much memory, such as 24GiB."),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=EngineConfig.knob_rule("max_num_seqs")["high"],
            help="Do so many requests fit at the same time? Without --context: with which longest context?",
            rich_help_panel=_QUESTION,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            parser=typed(tokens), metavar="TOKENS", help="Tokens of each, such as 8k (8192).", rich_help_panel=_QUESTION
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Lengths of your requests: a trace, as for bench --trace, or a line each with its length, or with its "
            "prompt's and its answer's.",
            rich_help_panel=_QUESTION,
        ),
    ] = None,
    mean_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            metavar="TOKENS",
            help="Also count sequences of this mean length, prompt and output.",
            rich_help_panel=_QUESTION,
        ),
    ] = None,
    cv_len: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="Standard deviation / mean of the lengths around --mean-len (log-normal).",
            rich_help_panel=_QUESTION,
        ),
    ] = None,
    weights: Annotated[
        int | None,
        typer.Option(
            parser=typed(size), metavar="SIZE", help="Size of the loaded weights; default: from files or config."
        ),
    ] = None,
    quantization: Annotated[str | None, quantization_option("Plan for a checkpoint")] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="GPU[:ENGINE]|local",
            help="Plan for this GPU, and simulate serving what fits (or --users with --context) to tell its speed; "
            "local: this machine, after `llmsched calibrate`.",
        ),
    ] = None,
    emit: Annotated[
        Target | None, typer.Option(help="Print the command line of that engine with the same memory, and no more.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    engine_options: EngineOptions,
) -> None:
    """Work out what a token costs in KV memory, how many blocks fit, and how many sequences that serves.

    MODEL may also be a config.json. Weights are not loaded and no GPU is needed: name one with --gpu or
    --gpu-memory. `serve` with the same options allocates exactly this.

    Exit code 0 if the model (and what --users and --context ask for) fits, 1 if it does not (the report says what
    would help), 2 for bad input.

    \b
    Examples:
      llmsched kv-budget demo
      llmsched kv-budget Qwen/Qwen3-8B --gpu l4 --max-model-len 8192
      llmsched kv-budget Qwen/Qwen3-8B --gpu all --users 32 --context 8k
      llmsched kv-budget Qwen/Qwen3-32B --gpu l40s --quantization fp8
      llmsched kv-budget ./config.json --gpu-memory 24GiB --lengths trace.csv --json
      llmsched kv-budget Qwen/Qwen3-8B --gpu h100 --emit vllm
      llmsched kv-budget Qwen/Qwen3-8B --simulate h100 --users 64 --context 4k
    """
    spec = resolve_model(model)
    config = config_for_demand(engine_options.config(spec), engine_options.given, users, context)
    if emit is not None and gpu == _ALL:
        raise ConfigError("emit", "is for one GPU; name it with --gpu instead of all")
    if emit is not None and quantization is not None:
        raise ConfigError("emit", f"starts a checkpoint that exists; name one in {quantization} as MODEL")
    mix = _lengths(config, mean_len, cv_len, lengths)
    if simulate is not None:
        gpu = _simulated_gpu(simulate, gpu, gpu_memory, emit)
    devices = _devices(config, gpu, gpu_memory)
    given = None if weights is None else Weights(weights, "--weights", exact=True)
    with render.progress_bar() as progress:
        planner = open_planner(spec, progress, given, quantization)
    demand, asked = MemoryDemand(users or 1, context or 0), users is not None or context is not None
    open_context = users is not None and config.max_model_len is None
    refused = refusal(planner.content, planner.cache)
    found = []
    with _named("context" if context and "max_model_len" not in engine_options.given else "max_model_len"):
        for device in devices:
            longest = longest_context(planner, config, device, demand.users) if open_context else config.max_model_len
            settings = replace(config, max_model_len=longest)
            found.append(Findings(spec, planner, settings, device, demand, asked, mean_len, mix, refused))
    if gpu == _ALL:
        _tell_all(found, json_output)
    else:
        _tell(found[0], emit, simulate, json_output)
    if not any(each.fits for each in found):
        raise typer.Exit(1)


@contextmanager
def _named(field: str) -> Iterator[None]:
    """Errors of max_model_len are told of the flag that has set it."""
    try:
        yield
    except ConfigError as problem:
        if problem.field != "max_model_len":
            raise
        raise ConfigError(field, problem.message) from problem


def _tell(found: Findings, emit: Target | None, simulate: str | None, json_output: bool) -> None:
    """One device: the report and what was simulated, or the command line of another engine, or all of it as JSON."""
    line = None if emit is None or not found.fits else command_line(found, emit)
    served = None if simulate is None else simulated.serve(found, simulate)
    if json_output:
        extra = ({"emit": line} if emit else {}) | ({"simulated": simulated.as_json(served)} if simulate else {})
        render.emit_json(document.as_json(found) | extra)
    elif line is not None:
        render.say(line)
    else:
        report.show(found)
        if served is not None:
            simulated.show(served)


def _simulated_gpu(simulate: str, gpu: str | None, gpu_memory: int | None, emit: Target | None) -> str | None:
    """The GPU to plan for, None for this machine's device. Raises ConfigError for what does not go together."""
    if emit is not None:
        raise ConfigError("emit", "prints a command line and no more; leave it or --simulate out")
    if gpu is not None or gpu_memory is not None:
        raise ConfigError("simulate", f"{simulate} says which device is meant; leave out --gpu and --gpu-memory")
    if simulate == _ALL:
        raise ConfigError("simulate", "is for one device; name a GPU (l4, h100, ...) or local")
    return None if simulate == LOCAL else _known_gpu("simulate", simulate.partition(":")[0], ", or local").key


def _tell_all(found: list[Findings], json_output: bool) -> None:
    compared = list(zip(_all_gpus(), found, strict=True))
    if json_output:
        render.emit_json(compare.as_json(compared))
    else:
        compare.show(compared)


def _lengths(
    config: EngineConfig, mean_len: int | None, cv_len: float | None, lengths: Path | None
) -> LengthDistribution | None:
    """The distribution of lengths that was asked for. Raises ConfigError."""
    if mean_len is not None and config.max_model_len is not None and mean_len > config.max_model_len:
        raise ConfigError("mean_len", f"{mean_len} is beyond {setting('max_model_len')} {config.max_model_len}")
    if lengths is not None:
        if cv_len is not None:
            raise ConfigError("cv_len", "describes lengths that --lengths tells already; leave one of them out")
        from llmsched.cli.kv_budget.lengths import read_lengths

        return read_lengths(lengths)
    if cv_len is None:
        return None
    if mean_len is None:
        raise ConfigError("cv_len", "needs the mean it is about; give --mean-len as well")
    if not 0 <= cv_len <= _MAX_CV:
        raise ConfigError("cv_len", f"{cv_len:g} is out of range; allowed is 0 to {_MAX_CV:g}")
    from llmsched.engine.memory.concurrency import lognormal_lengths

    return lognormal_lengths(mean_len, cv_len)


def _devices(config: EngineConfig, gpu: str | None, gpu_memory: int | None) -> list[DeviceMemory]:
    """The GPUs that were named or described, else the device of this machine. Raises ConfigError."""
    if gpu is None and gpu_memory is None:
        return [device_memory(config.device)]
    if gpu is not None and gpu_memory is not None:
        raise ConfigError("gpu", f"{gpu} says how much memory there is; leave out --gpu or --gpu-memory")
    if config.device == "cpu":
        raise ConfigError("device", "cpu and a GPU are both asked for; leave out one of them")
    if gpu_memory is not None:
        return [DeviceMemory("cuda", f"GPU with {human_bytes(gpu_memory)}", gpu_memory)]
    if gpu == _ALL:
        return [gpu_device(spec) for spec in _all_gpus()]
    return [gpu_device(_known_gpu("gpu", gpu or ""))]


def _known_gpu(field: str, name: str, besides: str = "") -> GpuSpec:
    """The GPU of that name; `besides` is what else the flag takes. Raises ConfigError."""
    try:
        return find_gpu(name)
    except UnknownNameError as unknown:
        raise ConfigError(field, f"{unknown}{besides}") from unknown


def _all_gpus() -> list[GpuSpec]:
    """Every listed GPU, the smallest first."""
    return sorted(gpus().values(), key=lambda spec: spec.memory)
