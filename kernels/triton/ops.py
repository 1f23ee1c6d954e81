"""The CUDA ops: launching the Triton kernels. Nothing here waits for the device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from llmsched.kernels.triton.attention import LOG2_E, attend_kernel, join_kernel, write_kernel
from llmsched.kernels.triton.tiling import MAX_SPLITS, Tiling, choose_tiling, padded


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """As `reference.paged_attention`. The caches must be contiguous, and so must each head of the query.

    Products of float32 are full float32 (no TF32); of half types they are accumulated in float32, and the softmax's
    weights are rounded to the query's type, as every flash attention does.
    """
    tiling = choose_tiling(
        num_tokens=query.shape[0],
        num_sequences=context_lens.shape[0],
        kv_heads=key_cache.shape[1],
        group=query.shape[1] // key_cache.shape[1],
        head_dim=key_cache.shape[3],
        value_dim=value_cache.shape[3],
        max_context=block_tables.shape[1] * key_cache.shape[2],
        item_size=query.element_size(),
        num_processors=num_processors(query.device),
    )
    return attend(
        query,
        key_cache,
        value_cache,
        block_tables,
        cu_seqlens_q,
        context_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        slopes=slopes,
        tiling=tiling,
    )


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tiling: Tiling,
    slopes: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with given tiles."""
    check_layout(query, key_cache, value_cache)
    tokens, heads, head_dim = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    sequences, splits = context_lens.shape[0], tiling.splits
    output = query.new_empty(tokens, heads, value_dim)
    if tokens == 0:
        return output
    parts, stats = output, output
    if splits > 1:
        parts = query.new_empty(tokens, heads, splits, value_dim, dtype=torch.float32)
        stats = query.new_empty(tokens, heads, splits, 2, dtype=torch.float32)
    num_tiles = tokens // (tiling.block_m // (heads // kv_heads)) + sequences
    attend_kernel[(num_tiles, kv_heads, splits)](
        parts,
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
        splits,
        GROUP=heads // kv_heads,
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
        SPLIT=splits > 1,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    if splits > 1:
        join_kernel[(tokens * heads,)](
            output,
            parts,
            stats,
            splits,
            VALUE_DIM=value_dim,
            BLOCK_V=tiling.block_v,
            MAX_SPLITS=MAX_SPLITS,
            enable_fp_fusion=True,
        )
    return output


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `reference.write_kv`. The caches must be contiguous, and so must each head of key and value."""
    check_layout(key, key_cache, value_cache)
    check_layout(value, key_cache, value_cache)
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


def check_layout(rows: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise ValueError for memory that the kernels cannot walk through."""
    for kv in (key_cache, value_cache):
        if not kv.is_contiguous():
            raise ValueError(f"KV cache with strides {kv.stride()} on the GPU; it must be contiguous")
    if rows.stride(2) != 1:
        raise ValueError(f"heads with strides {rows.stride()} on the GPU; the last must be 1")


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
