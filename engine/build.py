"""From a configuration to an engine that is ready to serve: locate, plan, load, allocate, warm up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.device import cpu_memory, device_memory
from llmsched.engine.kv.budget import MemoryPlan, model_shape, plan_memory
from llmsched.engine.kv.dtypes import DTYPE_BYTES, check_servable, planned_kv_dtype
from llmsched.engine.kv.swap import SwapSpace, plan_swap
from llmsched.engine.measure import measured_memory, tensor_bytes
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.model.load import ModelSource, load_config, load_info, load_model, load_tokenizer, locate
from llmsched.engine.model.placement import resolve_device, resolve_dtype
from llmsched.engine.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llmsched.engine.config import Device, DType, KVDType


def build_engine(config: EngineConfig, progress: Progress = silent, metrics_prefix: str = "llmsched") -> Engine:
    """Load `config.model` and reserve its memory; what can be refused is refused before the weights are read.

    The engine's config has every value filled in. Raises ModelError, ConfigError.
    """
    check_servable(config)
    source = locate(config.model, progress)
    model_config = load_config(source)
    tokenizer = load_tokenizer(source)
    info = load_info(source, model_config, tokenizer)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    dtype_name = str(dtype).removeprefix("torch.")
    kv_dtype = planned_kv_dtype(config, dtype_name)
    plan = _plan(source, model_config, config, device, dtype_name, kv_dtype)
    swap = _swap(config, plan)
    config = replace(
        config,
        device=cast("Device", device),
        dtype=cast("DType", dtype_name),
        kv_cache_dtype=cast("KVDType", kv_dtype),
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )

    import torch

    from llmsched.engine.executor.torch_executor import TorchExecutor

    model = load_model(source, model_config, device=device, dtype=dtype, attn_implementation="eager", progress=progress)
    executor = TorchExecutor(
        model,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        device=device,
        kv_dtype=getattr(torch, kv_dtype),
        max_model_len=plan.max_model_len,
        num_swap_slots=swap.num_slots,
    )
    progress("warming up", 0, 1)
    peak = executor.warmup(plan.max_num_batched_tokens, config.max_num_seqs, plan.max_model_len)
    plan = replace(plan, measured=measured_memory(tensor_bytes(model), executor, plan, peak))
    progress("warming up", 1, 1)
    metrics = EngineMetrics(info.name, plan.block_size, plan.num_blocks, metrics_prefix)
    return Engine(config, info, tokenizer, executor, plan.num_blocks, plan=plan, swap=swap, metrics=metrics)


def _plan(
    source: ModelSource, model_config: PretrainedConfig, config: EngineConfig, device: str, dtype: str, kv_dtype: str
) -> MemoryPlan:
    path = source.path if source.kind == "directory" else None
    dtype_bytes, kv_dtype_bytes = DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype]
    shape = model_shape(model_config, dtype_bytes=dtype_bytes, path=path)
    return plan_memory(shape, config, device_memory(device), dtype_bytes=dtype_bytes, kv_dtype_bytes=kv_dtype_bytes)


def _swap(config: EngineConfig, plan: MemoryPlan) -> SwapSpace:
    """Swap space lies in host memory; on a CPU that is what the plan is about as well."""
    free = cpu_memory().free
    if plan.device.kind == "cpu":
        free -= plan.fixed_bytes + plan.num_blocks * plan.block_bytes
    return plan_swap(config.swap_space, plan.block_bytes, free)
