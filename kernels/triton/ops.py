"""CUDA ops: choice of tile sizes and launch of the Triton kernels. No op waits for the device."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from llmsched.kernels.reference import AttentionOptions
from llmsched.kernels.triton.attention import LOG2_E, attend_kernel, join_kernel, write_kernel

MIN_PRODUCT = 16  # fewest rows, columns and depth of a tensor-core product
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


class Tiling(NamedTuple):
    """Sizes of the tiles of one launch: block_m rows (queries x query heads of one KV head) and block_n keys.

    Head sizes of keys are padded to block_d, those of values to block_v. `splits` programs share the keys of a tile.
    """

    block_m: int
    block_n: int
    block_d: int
    block_v: int
    splits: int
    num_warps: int
    num_stages: int


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    tiling: Tiling | None = None,
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


def _check_heads(rows: Tensor) -> None:
    if rows.stride(2) != 1:
        raise ValueError(f"heads have strides {rows.stride()}; the last must be 1 (contiguous heads)")


@cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_tiling(
    *,
    num_tokens: int,
    num_sequences: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    value_dim: int,
    max_context: int,
    item_size: int,
    num_processors: int,
) -> Tiling:
    """Choose the tile sizes for a batch.

    `group` is the number of query heads per KV head. `max_context`, in tokens, may be an upper bound. `item_size` is
    the bytes of one element of the query. `num_processors` is the GPU's number of streaming multiprocessors. For each
    dtype and head size there are only two values of block_m, for batches of decodes and for all others, so that few
    kernels are compiled. The number of splits is the smallest that gives every multiprocessor two programs, but
    at most MAX_SPLITS, and a split has at least MIN_SPLIT_TOKENS keys.
    """
    block_d, block_v = padded(head_dim), padded(value_dim)
    row_bytes = max(block_d, block_v) * item_size
    decodes_only = num_tokens <= num_sequences
    if item_size == 4:  # full float32 products run on CUDA cores, not tensor cores, and read registers
        block_m, block_n = 16, 32 if row_bytes <= 1024 else 16
        num_warps, num_stages = 4 if row_bytes <= 512 else 8, 1
    else:  # three stages: block ids, keys and values, products
        block_m, block_n = (128, 64) if row_bytes <= 256 else (64, 32) if row_bytes <= 512 else (32, 16)
        num_warps, num_stages = 8, 3
        if decodes_only:
            block_m, num_warps = 16, 4
    block_m = max(block_m, padded(group))
    programs = (num_tokens // (block_m // group) + num_sequences) * kv_heads
    useful = min(MAX_SPLITS, max_context // MIN_SPLIT_TOKENS)
    splits = max(1, min(useful, -(-2 * num_processors // programs)))
    return Tiling(block_m, block_n, block_d, block_v, splits, num_warps, num_stages)


def padded(size: int) -> int:
    """Return the smallest power of two that is at least `size` and at least MIN_PRODUCT."""
    return max(MIN_PRODUCT, 1 << (size - 1).bit_length())
