"""The plan as the command line of another engine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from llmsched.cli.kv_budget.analysis import Findings

Target = Literal["vllm", "sglang"]

_GIB = 1 << 30


def command_line(found: Findings, target: Target) -> str:
    """What starts vLLM or SGLang with the same model, types, lengths and memory."""
    words = _vllm(found) if target == "vllm" else _sglang(found)
    return shlex.join(words)


def _model(found: Findings) -> str:
    """What the other engine can open: a directory, a .gguf file or a hub id."""
    if found.spec == "demo" and found.planner.directory is not None:
        return str(found.planner.directory)
    return str(Path(found.spec).parent) if found.spec.endswith(".json") else found.spec


def _vllm(found: Findings) -> Iterator[str]:
    plan, config = found.plan, found.config
    if plan.device.kind == "cpu":
        yield from ("env", f"VLLM_CPU_KVCACHE_SPACE={-(-plan.available_kv_bytes // _GIB)}")
    yield from ("vllm", "serve", _model(found), "--dtype", found.dtype)
    if found.kv_dtype != found.dtype:
        yield from ("--kv-cache-dtype", found.kv_dtype)
    yield from ("--max-model-len", str(plan.max_model_len), "--max-num-seqs", str(plan.max_num_seqs_limit))
    yield from ("--max-num-batched-tokens", str(plan.max_num_batched_tokens), "--block-size", str(plan.block_size))
    if config.num_gpu_blocks_override is not None:
        yield from ("--num-gpu-blocks-override", str(config.num_gpu_blocks_override))
    elif plan.device.kind == "cuda" and config.kv_cache_memory_bytes is not None:
        yield from ("--kv-cache-memory-bytes", str(config.kv_cache_memory_bytes))
    if plan.device.kind == "cuda":
        yield from ("--gpu-memory-utilization", f"{plan.utilisation:g}")


def _sglang(found: Findings) -> Iterator[str]:
    """SGLang's share is of weights and KV alone; what steps need is in the rest."""
    plan, config = found.plan, found.config
    yield from ("python", "-m", "sglang.launch_server", "--model-path", _model(found), "--dtype", found.dtype)
    if found.kv_dtype != found.dtype:
        yield from ("--kv-cache-dtype", {"fp8": "fp8_e4m3", "bfloat16": "bf16"}.get(found.kv_dtype, found.kv_dtype))
    yield from ("--context-length", str(plan.max_model_len), "--max-running-requests", str(plan.max_num_seqs_limit))
    yield from ("--chunked-prefill-size", str(plan.max_num_batched_tokens), "--page-size", str(plan.block_size))
    if plan.device.kind == "cpu":
        yield from ("--device", "cpu")
    if plan.device.kind == "cpu" or config.kv_cache_memory_bytes or config.num_gpu_blocks_override:
        yield from ("--max-total-tokens", str(plan.num_tokens))
    else:
        static = plan.weights_bytes + plan.kv_bytes
        yield from ("--mem-fraction-static", f"{static / plan.device.total:.3f}")
