"""CUDA ops: launches of the Triton kernels. No op waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import triton
from torch import Tensor

from llmsched.kernels.reference import Activation, AttentionOptions, AttentionShape, Int32, Put
from llmsched.kernels.reference import linear as linear
from llmsched.kernels.triton.attention import LOG2_E, attend_kernel, join_kernel, write_kernel
from llmsched.kernels.triton.layer import gate_kernel, norm_kernel, rotary_kernel
from llmsched.kernels.triton.sampling import sample_kernel
from llmsched.kernels.triton.tiling import MAX_SPLITS, Tiling, choose_tiling, num_processors, padded

GATE_BLOCK = 1024

#: Tokens of one pass of the sampling kernel, and its warps: with more tokens per thread, registers would spill.
SAMPLING_BLOCK, SAMPLING_WARPS = 2048, 16

_compiled: list[str] = []


def _count_compilation(**details: Any) -> None:
    _compiled.append(details["repr"])


triton.knobs.runtime.jit_post_compile_hook = _count_compilation


def num_compiled() -> int:
    """Return how many variants of kernels this process has compiled, or loaded from Triton's cache on disk."""
    return len(_compiled)


def prepare_attention(
    layers: Sequence[AttentionShape], cu_seqlens_q: Int32, context_lens: Int32, device: torch.device, put: Put
) -> list[None]:
    """Do nothing: the kernel finds its work on the device."""
    return [None] * len(layers)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    tiling: Tiling | None = None,
    work: None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Compute `reference.paged_attention`. Raises ValueError unless each head of the query is contiguous.

    Products of float32 are computed in full float32, without TF32. Products of 16-bit types are accumulated in float32,
    and the softmax weights are rounded to the query's dtype, as in every flash attention. Without `tiling`, the shapes
    determine the tiles.
    """
    _check_heads(query)
    tokens, heads, _ = query.shape
    value_dim = value_cache.shape[3]
    output = query.new_empty(tokens, heads, value_dim)
    if tokens == 0:
        return output
    tiling = tiling or choose_tiling(
        num_tokens=tokens,
        num_sequences=context_lens.shape[0],
        kv_heads=key_cache.shape[1],
        group=heads // key_cache.shape[1],
        head_dim=key_cache.shape[3],
        value_dim=value_dim,
        max_context=block_tables.shape[1] * key_cache.shape[2],
        item_size=query.element_size(),
        num_processors=num_processors(query.device),
    )
    batch = (query, key_cache, value_cache, block_tables, cu_seqlens_q, context_lens)
    if tiling.splits == 1:
        _launch_attention(output, output, *batch, tiling, **options)
        return output
    parts = query.new_empty(tokens, heads, tiling.splits, value_dim, dtype=torch.float32)
    stats = query.new_empty(tokens, heads, tiling.splits, 2, dtype=torch.float32)
    _launch_attention(parts, stats, *batch, tiling, **options)
    constants = {"VALUE_DIM": value_dim, "BLOCK_V": tiling.block_v, "MAX_SPLITS": MAX_SPLITS}
    join_kernel[(tokens * heads,)](output, parts, stats, tiling.splits, **constants, enable_fp_fusion=True)
    return output


def _launch_attention(
    output: Tensor,
    stats: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    tiling: Tiling,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    sequences, group = context_lens.shape[0], heads // kv_heads
    attend_kernel[(tokens // (tiling.block_m // group) + sequences, kv_heads, tiling.splits)](
        output,
        stats,
        query,
        key_cache,
        value_cache,
        block_tables.contiguous(),
        cu_seqlens_q,
        context_lens,
        query if sinks is None else sinks.contiguous(),
        query if slopes is None else slopes.contiguous(),
        scale if softcap is not None else scale * LOG2_E.value,
        softcap or 1.0,
        query.stride(0),
        query.stride(1),
        sequences,
        block_tables.shape[1],
        tiling.splits,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=tiling.block_d,
        BLOCK_V=tiling.block_v,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        SLOPES=slopes is not None,
        SPLIT=tiling.splits > 1,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write KV like `reference.write_kv`. Raises ValueError unless each head of key and value is contiguous."""
    _check_heads(key)
    _check_heads(value)
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    for new, kv in ((key, key_cache), (value, value_cache)):
        _, kv_heads, block_size, dim = kv.shape
        write_kernel[(tokens, kv_heads)](
            new,
            kv,
            slot_mapping,
            new.stride(0),
            new.stride(1),
            KV_HEADS=kv_heads,
            BLOCK_SIZE=block_size,
            DIM=dim,
            BLOCK_D=padded(dim),
            num_warps=1,
            enable_fp_fusion=True,
        )


def add_norm(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    branch_weight: Tensor | None = None,
) -> Tensor:
    """Compute `reference.add_norm` of contiguous tensors."""
    tokens, size = residual.shape
    output = torch.empty_like(residual)
    if tokens:
        norm_kernel[(tokens,)](
            residual,
            residual if branch is None else branch,
            weight if branch_weight is None else branch_weight,
            weight,
            output,
            eps,
            offset,
            SIZE=size,
            BLOCK=padded(size),
            BRANCH=branch is not None,
            BRANCH_NORM=branch_weight is not None,
            num_warps=4 if size <= 2048 else 8,
            enable_fp_fusion=True,
        )
    return output


def rotate_and_write(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float = 0.0,
    offset: float = 0.0,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
) -> Tensor:
    """Compute `reference.rotate_and_write` of contiguous tensors."""
    tokens, size = projected.shape
    _, kv_heads, block_size, head_dim = key_cache.shape
    heads = size // head_dim - 2 * kv_heads
    query = projected.new_empty(tokens, heads, head_dim)
    if tokens:
        rotary_kernel[(tokens, heads + 2 * kv_heads)](
            projected,
            cos,
            sin,
            cos if query_weight is None else query_weight,
            cos if key_weight is None else key_weight,
            query,
            key_cache,
            value_cache,
            slot_mapping,
            eps,
            offset,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=head_dim,
            BLOCK_SIZE=block_size,
            BLOCK_H=padded(head_dim // 2),
            NORM=query_weight is not None,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return query


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute `reference.gated` of a contiguous tensor."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(tokens, size)
    if tokens:
        grid = (tokens, -(-size // GATE_BLOCK))
        gate_kernel[grid](gate_up, output, SIZE=size, BLOCK=GATE_BLOCK, GELU=activation == "gelu_tanh")
    return output


def sample(logits: Tensor, parameters: Tensor) -> Tensor:
    """Compute `reference.sample`."""
    rows, width = logits.shape
    outcomes = torch.empty(rows, dtype=torch.int64, device=logits.device)
    shift = 16 if logits.dtype is torch.bfloat16 else 0
    batch = (logits.contiguous(), parameters.contiguous())
    sample_kernel[(rows,)](outcomes, *batch, rows, width, SHIFT=shift, BLOCK=SAMPLING_BLOCK, num_warps=SAMPLING_WARPS)
    return outcomes


def _check_heads(rows: Tensor) -> None:
    if rows.stride(2) != 1:
        raise ValueError(f"heads have strides {rows.stride()}; the last must be 1 (contiguous heads)")
