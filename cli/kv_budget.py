"""`llmsched kv-budget`: KV memory and how many sequences it serves, by the same plan that `serve` allocates by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from llmsched.cli import budget_report, render
from llmsched.cli.options import EngineOptions, ModelArgument, resolve_model, size, with_engine_options
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory, device_memory
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.kv.budget import draft_memory, model_shape
from llmsched.engine.kv.fields import read_config_file, transformers_config
from llmsched.engine.kv.weights import Weights
from llmsched.engine.units import human_bytes
from llmsched.profiles.gpus import UnknownGpuError, find_gpu

KNOBS = (
    "dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
)
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's config, and the directory in which its weights may lie."""

    config: Mapping[str, Any]
    directory: Path | None


@with_engine_options(only=KNOBS)
def kv_budget(
    model: ModelArgument = None,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan for this GPU instead of the one here: l4, h100, rtx4090, ..."),
    ] = None,
    gpu_memory: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Plan for a GPU with this much memory, such as 24GiB."),
    ] = None,
    mean_len: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Also count sequences of this mean length, prompt and output."),
    ] = None,
    weights: Annotated[
        int | None,
        typer.Option(parser=size, metavar="SIZE", help="Size of the loaded weights; default: from files or config."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    engine_options: EngineOptions,
) -> None:
    """Work out what a token costs in KV memory, how many blocks fit, and how many sequences that serves.

    MODEL may also be a config.json. Weights are not loaded and no GPU is needed: name one with --gpu or
    --gpu-memory. `serve` with the same options allocates exactly this.

    Exit code 0 if the model fits, 1 if it does not (the report says what would help), 2 for bad input.

    \b
    Examples:
      llmsched kv-budget demo
      llmsched kv-budget Qwen/Qwen3-8B --gpu l4 --max-model-len 8192
      llmsched kv-budget ./config.json --gpu-memory 24GiB --mean-len 1500 --json
    """
    spec = resolve_model(model)
    config = engine_options.config(spec)
    device = _device(config, gpu, gpu_memory)
    files = _read_model(spec)
    dtype = _dtype(config, device)
    _check_mean(mean_len, config)
    given = None if weights is None else Weights(weights, "--weights", exact=True)
    shape = model_shape(files.config, dtype_bytes=_DTYPE_BYTES[dtype], path=files.directory, weights=given)
    plan = draft_memory(shape, config, device, dtype_bytes=_DTYPE_BYTES[dtype])
    report = budget_report.Report(spec, dtype, config, shape, plan, mean_len, _refusal(files.config, spec))
    if json_output:
        render.emit_json(budget_report.as_json(report))
    else:
        budget_report.show(report)
    if not plan.fits:
        raise typer.Exit(1)


def _check_mean(mean_len: int | None, config: EngineConfig) -> None:
    if mean_len is None:
        return
    if mean_len < 1:
        raise ConfigError("--mean-len", f"{mean_len} tokens is out of range; allowed is 1 or more")
    if config.max_model_len is not None and mean_len > config.max_model_len:
        raise ConfigError("--mean-len", f"{mean_len} is beyond max_model_len {config.max_model_len}")


def _device(config: EngineConfig, gpu: str | None, gpu_memory: int | None) -> DeviceMemory:
    """The GPU that was named or described, else the device of this machine."""
    if gpu is None and gpu_memory is None:
        return device_memory(config.device)
    if gpu is not None and gpu_memory is not None:
        raise ConfigError("--gpu", f"{gpu} says how much memory there is; leave out --gpu or --gpu-memory")
    if config.device == "cpu":
        raise ConfigError("device", "cpu and a GPU are both asked for; leave out one of them")
    if gpu_memory is not None:
        return DeviceMemory("cuda", f"GPU with {human_bytes(gpu_memory)}", gpu_memory)
    try:
        spec = find_gpu(gpu or "")
    except UnknownGpuError as unknown:
        raise ConfigError("--gpu", str(unknown)) from unknown
    return DeviceMemory("cuda", spec.name, spec.memory, computes_bf16=spec.bf16_flops > 0)


def _dtype(config: EngineConfig, device: DeviceMemory) -> str:
    """The type of weights and KV, as serve resolves it."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if device.computes_bf16 else "float32"


def _read_model(spec: str) -> ModelFiles:
    """Config and directory of MODEL; of a hub repository only config.json is fetched. Raises ModelError."""
    from llmsched.engine.model.source import fetch_config, locate

    path = Path(spec).expanduser()
    if path.suffix == ".json" or path.is_dir():
        return ModelFiles(read_config_file(path), path if path.is_dir() else None)
    if path.suffix == ".gguf":
        from llmsched.engine.model.gguf import read_gguf
        from llmsched.engine.model.gguf_config import gguf_settings

        return ModelFiles(gguf_settings(read_gguf(locate(spec).path)), None)
    if path.exists():
        raise ModelError(f"model {spec}: is neither a directory, a config.json nor a .gguf file")
    with render.progress_bar() as progress:
        directory = locate(spec, progress).path if spec == "demo" else fetch_config(spec, progress).parent
    return ModelFiles(read_config_file(directory), directory)


def _refusal(config: Mapping[str, Any], spec: str) -> str | None:
    """Why serve would not take the model, None if it would as far as its config tells."""
    from llmsched.engine.model.support import check_stated, check_supported

    try:
        if not check_stated(config, spec):
            made = transformers_config(config)
            if made is None:
                return f"transformers does not know model_type {config.get('model_type')}"
            check_supported(made, spec)
    except ModelError as refusal:
        return str(refusal).removeprefix(f"model {spec}: ")
    return None
