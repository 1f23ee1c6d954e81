"""The one memory model: what a device must hold, what is left for KV blocks, and how many sequences that serves.

    GPU   budget    = min(total x gpu_memory_utilization, total - what others hold)
          KV        = budget - weights - activations - context - recurrent state
    CPU   KV        = kv_cache_memory_bytes, else min(4 GiB, a quarter of the available memory)
    both  blocks    = KV // (block_size x cached bytes per token)

A sequence of n tokens needs ceil((n - 1) / block_size) blocks: the last token that is sampled is never computed. All
blocks are usable; none is set aside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ModelError
from llmsched.engine.kv import advice
from llmsched.engine.kv.fields import Fields, read_fields
from llmsched.engine.kv.geometry import Geometry, kv_geometry
from llmsched.engine.kv.plan import MemoryPlan
from llmsched.engine.kv.weights import Weights, model_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "LOGITS_BYTES",
    "MemoryPlan",
    "ModelShape",
    "activation_bytes",
    "draft_memory",
    "model_shape",
    "plan_memory",
    "token_budget",
]

#: Tokens of one step where max_num_batched_tokens is not set.
DEFAULT_TOKEN_BUDGET: Mapping[str, int] = {"cuda": 2048, "cpu": 256}

#: The CUDA context with the code of kernels and cuBLAS workspaces; 0.3 to 0.5 GiB on cards from L4 to H100.
CONTEXT_BYTES = 400 << 20

#: Bound of one fp32 copy of logits: sampling and log-probabilities take as many rows at a time as stay below it.
LOGITS_BYTES = 32 << 20

#: fp32 copies of those logits that are alive at once when every row's nucleus must be sorted in full (measured: 14.7).
SAMPLER_COPIES = 15

#: KV on a CPU, at most, where nothing is said.
DEFAULT_CPU_KV_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the memory model needs to know of a model.

    `inner_size` is the width of the MLP that a token goes through; `max_position` is None where none is stated (ALiBi).
    """

    geometry: Geometry
    weights: Weights
    vocab_size: int
    hidden_size: int
    inner_size: int
    max_position: int | None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing about weights and activations had to be left out."""
        return self.weights.exact and self.vocab_size > 0 and self.hidden_size > 0


def model_shape(
    config: PretrainedConfig | Mapping[str, Any],
    *,
    dtype_bytes: int,
    path: Path | None = None,
    weights: Weights | None = None,
) -> ModelShape:
    """Read the shape from a transformers config or the content of a config.json.

    `path` is the model's directory, where weight files are looked for; `weights` is taken as given instead. Raises
    ModelError when the config does not say enough.
    """
    fields = read_fields(config)
    geometry = kv_geometry(fields, dtype_bytes)
    hidden, inner = fields.get("hidden_size", "n_embd", "d_model"), _inner_size(fields)
    vocab = fields.get("vocab_size")
    position, notes = _max_position(fields)
    if not hidden or not vocab:
        notes += ("activations are not counted in full: the config lacks hidden_size or vocab_size",)
    weights = weights or model_weights(path, config, dtype_bytes)
    return ModelShape(geometry, weights, vocab or 0, hidden or 0, inner, position, notes)


def _inner_size(fields: Fields) -> int:
    """Width of the MLP, or of all experts together that one token is sent to."""
    hidden = fields.get("hidden_size", "n_embd", "d_model", default=0)
    dense = fields.get("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    chosen = fields.get("num_experts_per_tok", "top_k_experts", "moe_topk", default=0)
    shared = fields.get("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=0)
    routed = chosen * fields.get("moe_intermediate_size", default=dense) + shared
    return max(int(dense), int(routed))


def _max_position(fields: Fields) -> tuple[int | None, tuple[str, ...]]:
    """The longest context that can be served exactly, and why it is shorter than the model's own if it is.

    Rotary embeddings of the kinds longrope and dynamic change for a whole batch as soon as one of its sequences passes
    the original context, which would make requests depend on each other.
    """
    stated = fields.get("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    original = fields.get("original_max_position_embeddings")
    limits = [stated]
    for rope in _ropes(fields):
        kind = str(rope.get("rope_type", rope.get("type")))
        if kind == "longrope":
            limits.append(rope.get("original_max_position_embeddings", original))
        elif "dynamic" in kind:
            limits.append(original)
    limit = min((each for each in limits if each), default=None)
    if limit == stated:
        return limit, ()
    return limit, (f"context limited to {limit} of {stated} tokens: beyond it the rotary embeddings change",)


def _ropes(fields: Fields) -> list[Mapping[str, Any]]:
    """Settings of the rotary embeddings: one set, or one for each kind of layer."""
    given = fields.get("rope_parameters", "rope_scaling", default={})
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    return nested or [given]


def token_budget(config: EngineConfig, kind: str) -> int:
    """max_num_batched_tokens, resolved for a device of `kind` (cuda or cpu)."""
    return config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET[kind]


def activation_bytes(shape: ModelShape, num_tokens: int, num_seqs: int, dtype_bytes: int) -> int:
    """The most memory that one step needs besides weights and KV.

    A step is in its layers or in its sampler, never in both, so it is the larger of

        layers   num_tokens x (4 x hidden + 3 x inner + 2 x head_dim) x dtype_bytes
                 (residual, its normed copy and attention's; gate, up and their product; rotary tables)
        sampler  num_seqs x vocab x dtype_bytes + 15 x min(num_seqs x vocab x 4, 32 MiB)

    The layers' term is what a profile of this engine shows for Llama, to the byte.
    """
    head_dim = max(group.head_dim_k for group in shape.geometry.groups)
    layers = num_tokens * (4 * shape.hidden_size + 3 * shape.inner_size + 2 * head_dim) * dtype_bytes
    logits = num_seqs * shape.vocab_size
    return max(layers, logits * dtype_bytes + SAMPLER_COPIES * min(4 * logits, LOGITS_BYTES))


def plan_memory(shape: ModelShape, config: EngineConfig, device: DeviceMemory, *, dtype_bytes: int) -> MemoryPlan:
    """The plan that serve allocates by. Raises ConfigError, with what would help, when it does not fit."""
    plan = draft_memory(shape, config, device, dtype_bytes=dtype_bytes)
    if plan.problem is not None:
        raise plan.problem
    return plan


def draft_memory(shape: ModelShape, config: EngineConfig, device: DeviceMemory, *, dtype_bytes: int) -> MemoryPlan:
    """Like plan_memory, but a plan that does not fit is returned with its `problem`.

    `dtype_bytes` is the size of one number of activations and KV. num_gpu_blocks_override decides the number of blocks,
    else kv_cache_memory_bytes, else what the budget leaves over. max_model_len is lowered to what fits where the
    user did not ask for a value.

    Raises ConfigError for a max_model_len beyond the model's positions, ModelError for a model without attention.
    """
    limit = shape.max_position
    if config.max_model_len is not None and limit is not None and config.max_model_len > limit:
        raise advice.beyond_model(config.max_model_len, limit)
    geometry, tokens = shape.geometry, token_budget(config, device.kind)
    block_bytes = config.block_size * geometry.cached_bytes_per_token(dtype_bytes)
    if block_bytes == 0:
        raise ModelError("the model has no attention layers: there is no KV to plan, and it cannot be served")
    on_gpu = device.kind == "cuda"
    share = math.floor(device.total * config.gpu_memory_utilization) if on_gpu else device.free
    plan = MemoryPlan(
        device=device,
        utilisation=config.gpu_memory_utilization,
        budget_bytes=min(share, device.free),
        weights_bytes=shape.weights.count,
        activation_bytes=activation_bytes(shape, tokens, config.max_num_seqs, dtype_bytes),
        context_bytes=CONTEXT_BYTES if on_gpu else 0,
        state_bytes=config.max_num_seqs * geometry.state_bytes_per_seq,
        available_kv_bytes=0,
        dtype_bytes=dtype_bytes,
        block_size=config.block_size,
        block_bytes=block_bytes,
        num_blocks=0,
        kv_bytes_per_token=geometry.kv_bytes_per_token(dtype_bytes),
        kv_bytes_per_token_window=geometry.kv_bytes_per_token_window(dtype_bytes),
        window=geometry.window,
        state_bytes_per_seq=geometry.state_bytes_per_seq,
        max_position=shape.max_position,
        max_model_len=config.max_model_len or shape.max_position or 0,
        max_num_batched_tokens=tokens,
        max_num_seqs_limit=config.max_num_seqs,
        confidence="exact" if geometry.confidence == "exact" and shape.exact else "estimate",
        notes=(*geometry.notes, *shape.weights.notes, *shape.notes),
    )
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
        return replace(plan, problem=advice.too_large(plan, config, wanted))
    if plan.num_blocks == 0:
        return replace(plan, problem=advice.no_room(plan, config))
    return plan


def _with_length(plan: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """Check the context length asked for, or find the one that fits."""
    if config.max_model_len is not None:
        if plan.blocks_for(config.max_model_len) > plan.num_blocks:
            return replace(plan, problem=plan.problem or advice.too_long(plan, config))
        return plan
    if plan.max_position is not None and plan.blocks_for(plan.max_position) <= plan.num_blocks:
        return plan
    if plan.num_blocks == 0:
        return plan
    if plan.max_position is None:
        reason = "the config states no context length; max_model_len is what the KV memory holds for one request"
    else:
        reason = f"max_model_len is lowered from {plan.max_position} to what the KV memory holds for one request"
    return replace(plan, max_model_len=plan.num_tokens, notes=(*plan.notes, reason))
