"""Command lines that start vLLM or SGLang with the memory plan of kv-budget."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from llmsched.cli.kv_budget.analysis import BudgetAnalysis

OtherEngine = Literal["vllm", "sglang"]

_GIB = 1 << 30


def command_line(analysis: BudgetAnalysis, engine: OtherEngine) -> str:
    """Return the command that starts `engine` with the analysis's model, dtypes, lengths and memory."""
    words = _vllm(analysis) if engine == "vllm" else _sglang(analysis)
    return shlex.join(words)


def _model(analysis: BudgetAnalysis) -> str:
    """Return the model argument for the other engine: a directory, a .gguf file or a hub id."""
    if analysis.spec == "demo" and analysis.planner.directory is not None:
        return str(analysis.planner.directory)
    return str(Path(analysis.spec).parent) if analysis.spec.endswith(".json") else analysis.spec


def _vllm(analysis: BudgetAnalysis) -> Iterator[str]:
    plan, config = analysis.plan, analysis.config
    if plan.device.kind == "cpu":
        yield from ("env", f"VLLM_CPU_KVCACHE_SPACE={-(-plan.available_kv_bytes // _GIB)}")
    yield from ("vllm", "serve", _model(analysis), "--dtype", analysis.dtype)
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


def _sglang(analysis: BudgetAnalysis) -> Iterator[str]:
    """Yield the words of the command. SGLang's memory fraction covers weights and KV, but not activations."""
    plan, config = analysis.plan, analysis.config
    yield from ("python", "-m", "sglang.launch_server", "--model-path", _model(analysis), "--dtype", analysis.dtype)
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
