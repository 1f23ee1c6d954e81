"""The one memory model: what a device must hold, what is left for KV blocks, and how many sequences that serves.

    GPU   budget    = min(total x gpu_memory_utilization, total - what others hold)
          KV        = budget - weights - activations - context - recurrent state
    CPU   KV        = kv_cache_memory_bytes, else min(4 GiB, a quarter of the available memory)
    both  blocks    = KV // (block_size x bytes per token that the layers of one group cache)

A sequence of n tokens needs ceil((n - 1) / block_size) blocks: the last token that is sampled is never computed. Where
layers with and without a window are cached in groups (engine/kv/layout.py), it needs so many in each of the latter, and
at most ceil((window - 1) / block_size) + 1 in each of the former. All blocks are usable; none is set aside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from llmsched.engine.architecture.shape import ModelShape
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ModelError, setting
from llmsched.engine.kv.layout import group_layers
from llmsched.engine.memory import plan_errors
from llmsched.engine.memory.activations import activation_bytes
from llmsched.engine.memory.plan import MemoryPlan

#: Tokens of one step where max_num_batched_tokens is not set.
DEFAULT_TOKEN_BUDGET: Mapping[str, int] = {"cuda": 2048, "cpu": 256}

#: The CUDA context with the code of kernels and cuBLAS workspaces; 0.3 to 0.5 GiB on cards from L4 to H100.
CONTEXT_BYTES = 400 << 20

#: KV on a CPU, at most, where nothing is said.
DEFAULT_CPU_KV_BYTES = 4 << 30


def token_budget(config: EngineConfig, kind: str) -> int:
    """max_num_batched_tokens, resolved for a device of `kind` (cuda or cpu)."""
    return config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET[kind]


def plan_memory(
    shape: ModelShape,
    config: EngineConfig,
    device: DeviceMemory,
    *,
    dtype_bytes: int,
    kv_dtype_bytes: int | None = None,
) -> MemoryPlan:
    """Return the plan that serve allocates by, with its `problem` if it does not fit.

    `dtype_bytes` is the size of one number of weights and activations, kv_dtype_bytes that of KV (default: the same).
    num_gpu_blocks_override decides the number of blocks, else kv_cache_memory_bytes, else what the budget leaves over.
    max_model_len is lowered to what fits where the user did not ask for a value.

    Raises ConfigError for a max_model_len beyond the model's positions, ModelError for a model without attention.
    """
    limit = shape.max_position
    if config.max_model_len is not None and limit is not None and config.max_model_len > limit:
        raise plan_errors.beyond_model(config.max_model_len, limit)
    if not shape.geometry.caches_kv:
        raise ModelError("the model has no attention layers: there is no KV to plan, and it cannot be served")
    kv_bytes = kv_dtype_bytes or dtype_bytes
    plan = _resolved(_parts(shape, config, device, dtype_bytes, kv_bytes, config.max_model_len or 0), config)
    if device.kind == "cpu" and config.max_model_len is None:
        # Attention's memory grows with the context, and the context with what memory is left: the first plan's
        # context is the most that there can be.
        plan = _resolved(_parts(shape, config, device, dtype_bytes, kv_bytes, plan.max_model_len), config)
    return plan


def _parts(
    shape: ModelShape, config: EngineConfig, device: DeviceMemory, dtype_bytes: int, kv_dtype_bytes: int, context: int
) -> MemoryPlan:
    """The plan without blocks: what everything else takes when no sequence is longer than `context`."""
    geometry, tokens, on_gpu = shape.geometry, token_budget(config, device.kind), device.kind == "cuda"
    cache = group_layers(geometry, config.block_size, config.max_model_len or shape.max_position)
    share = math.floor(device.total * config.gpu_memory_utilization) if on_gpu else device.free
    return MemoryPlan(
        device=device,
        utilisation=config.gpu_memory_utilization,
        budget_bytes=min(share, device.free),
        weights_bytes=shape.weights.count,
        activation_bytes=activation_bytes(
            shape, tokens, config.max_num_seqs, dtype_bytes, kind=device.kind, context=context
        ),
        context_bytes=CONTEXT_BYTES if on_gpu else 0,
        state_bytes=config.max_num_seqs * geometry.state_bytes_per_seq,
        available_kv_bytes=0,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=kv_dtype_bytes,
        layout=cache.layout,
        block_bytes=config.block_size * cache.bytes_per_token(kv_dtype_bytes),
        num_blocks=0,
        headroom=config.headroom if config.scheduling_policy == "fair" else 0.0,
        kv_bytes_per_token=geometry.kv_bytes_per_token(kv_dtype_bytes),
        kv_bytes_per_token_window=geometry.kv_bytes_per_token_window(kv_dtype_bytes),
        window=geometry.window,
        state_bytes_per_seq=geometry.state_bytes_per_seq,
        max_position=shape.max_position,
        max_model_len=config.max_model_len or shape.max_position or 0,
        max_num_batched_tokens=tokens,
        max_num_seqs_limit=config.max_num_seqs,
        confidence="exact" if geometry.confidence == "exact" and shape.exact else "estimate",
        notes=(*geometry.notes, *shape.weights.notes, *shape.notes),
    )


def _resolved(plan: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    return _with_length(_with_blocks(plan, config), config)


def _with_blocks(plan: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """Divide what is left for KV into blocks."""
    room = plan.device.free - plan.fixed_bytes
    if config.num_gpu_blocks_override is not None:
        wanted = config.num_gpu_blocks_override * plan.block_bytes
    elif config.kv_cache_memory_bytes is not None:
        wanted = config.kv_cache_memory_bytes
    elif plan.device.kind == "cpu":
        wanted = min(DEFAULT_CPU_KV_BYTES, plan.device.free // 4, room)
    else:
        wanted = plan.budget_bytes - plan.fixed_bytes
    available = max(0, min(wanted, room))
    plan = replace(plan, available_kv_bytes=available, num_blocks=available // plan.block_bytes)
    if wanted > room:
        return replace(plan, problem=plan_errors.too_large(plan, config, wanted))
    if plan.num_blocks < plan.blocks_for(1):
        return replace(plan, problem=plan_errors.no_room(plan, config))
    return plan


def _with_length(plan: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """Check the context length asked for, or find the one that fits."""
    if config.max_model_len is not None:
        if plan.blocks_for(config.max_model_len) > plan.num_blocks:
            return replace(plan, problem=plan.problem or plan_errors.too_long(plan, config))
        return plan
    if plan.max_position is not None and plan.blocks_for(plan.max_position) <= plan.num_blocks:
        return plan
    if plan.longest == 0:
        return plan
    if plan.max_position is None:
        reason = f"the config states no context length; {setting('max_model_len')} is"
    else:
        reason = f"{setting('max_model_len')} is lowered from {plan.max_position} to"
    reason += " what the KV memory holds for one request"
    return replace(plan, max_model_len=plan.longest, notes=(*plan.notes, reason))
