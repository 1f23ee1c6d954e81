from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from llmsched.cli.kv_budget.analysis import BudgetAnalysis
from llmsched.cli.options.config_flags import serve_command
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.vllm_profile import vllm_defaults

OtherEngine = Literal["vllm", "vllm-0.17", "sglang"]

_GIB = 1 << 30


def command_line(analysis: BudgetAnalysis, engine: OtherEngine) -> str:
    """Return the command that starts `engine` with the plan. Raises ConfigError if the model's name is unknown."""
    model = _model(analysis)
    if model is None:
        raise ConfigError("emit", f"{analysis.spec} names no model; give its directory or its hub id as MODEL")
    return shlex.join(_sglang(analysis, model) if engine == "sglang" else _vllm(analysis, model))


def serve_line(analysis: BudgetAnalysis) -> str | None:
    """Return the `llmsched serve` command of the plan, or None if `serve` cannot run the plan.

    If the demand does not fit, the command has the settings of the cheapest change that makes it fit.
    """
    config = analysis.config
    if analysis.planner.profile is not None:
        return None
    if not analysis.fits:
        here = (each for each in analysis.changes if each.settings and "gpu" not in each.settings)
        if (change := next(here, None)) is None:
            return None
        config = replace(config, **change.settings)
    model = "demo" if analysis.spec == "demo" else _model(analysis)
    if model is None or analysis.refusal or analysis.quantization:
        return None
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
    default = EngineConfig()
    return serve_command(model, {name: value for name, value in given.items() if value != getattr(default, name)})


def with_vllm_defaults(config: EngineConfig, given: Mapping[str, Any], device: DeviceMemory) -> EngineConfig:
    """Return `config` with vLLM's defaults for the settings not in `given`. Return `config` unchanged for a CPU."""
    defaults: Mapping[str, Any] = vllm_defaults(device) if device.kind == "cuda" else {}
    return replace(config, **{name: value for name, value in defaults.items() if name not in given})


def _model(analysis: BudgetAnalysis) -> str | None:
    """Return the model's directory, .gguf file or hub id; None if MODEL is a JSON file that names no model."""
    spec, path = analysis.spec, Path(analysis.spec)
    if path.suffix != ".json":
        return str(analysis.planner.directory) if spec == "demo" else spec
    weights = (file for suffix in ("safetensors", "bin") for file in path.parent.glob(f"*.{suffix}"))
    if path.name == "config.json" and any(weights):
        return str(path.parent)
    stated = str(analysis.planner.content.get("_name_or_path") or "")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", stated) and not Path(stated).exists():
        return stated
    named = re.fullmatch(r"([\w.]+(?:-[\w.]+)*)--([\w.-]+?)(?:_config)?", path.stem)
    if named:
        return f"{named[1]}/{named[2]}"
    return str(path.parent) if path.name == "config.json" else None


def _vllm(analysis: BudgetAnalysis, model: str) -> Iterator[str]:
    plan, config = analysis.plan, analysis.config
    if plan.device.kind == "cpu":
        yield from ("env", f"VLLM_CPU_KVCACHE_SPACE={-(-plan.available_kv_bytes // _GIB)}")
    yield from ("vllm", "serve", model, "--dtype", analysis.dtype)
    yield from _online_fp8(analysis)
    if analysis.kv_dtype != analysis.dtype:
        yield from ("--kv-cache-dtype", analysis.kv_dtype)
    yield from ("--max-model-len", str(plan.max_model_len), "--max-num-seqs", str(plan.max_num_seqs_limit))
    yield from ("--max-num-batched-tokens", str(plan.max_num_batched_tokens), "--block-size", str(plan.block_size))
    if config.num_gpu_blocks_override is not None:
        yield from ("--num-gpu-blocks-override", str(config.num_gpu_blocks_override))
    elif plan.device.kind == "cuda" and config.kv_cache_memory_bytes is not None:
        yield from ("--kv-cache-memory-bytes", str(config.kv_cache_memory_bytes))
    if plan.device.kind == "cuda":
        yield from ("--gpu-memory-utilization", f"{plan.utilisation:g}")


def _sglang(analysis: BudgetAnalysis, model: str) -> Iterator[str]:
    plan, config = analysis.plan, analysis.config
    yield from ("python", "-m", "sglang.launch_server", "--model-path", model, "--dtype", analysis.dtype)
    yield from _online_fp8(analysis)
    if analysis.kv_dtype != analysis.dtype:
        names = {"fp8": "fp8_e4m3", "bfloat16": "bf16"}
        yield from ("--kv-cache-dtype", names.get(analysis.kv_dtype, analysis.kv_dtype))
    yield from ("--context-length", str(plan.max_model_len), "--max-running-requests", str(plan.max_num_seqs_limit))
    yield from ("--chunked-prefill-size", str(plan.max_num_batched_tokens), "--page-size", str(plan.block_size))
    if plan.device.kind == "cpu":
        yield from ("--device", "cpu")
    if plan.device.kind == "cpu" or config.kv_cache_memory_bytes or config.num_gpu_blocks_override:
        yield from ("--max-total-tokens", str(plan.num_tokens))
    else:
        static = plan.weights_bytes + plan.kv_bytes
        yield from ("--mem-fraction-static", f"{static / plan.device.total:.3f}")


def _online_fp8(analysis: BudgetAnalysis) -> Iterator[str]:
    if analysis.quantization:
        yield from ("--quantization", analysis.quantization)
