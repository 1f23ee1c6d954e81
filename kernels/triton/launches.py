"""Launches of the attention kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from llmsched.kernels.reference import AttentionOptions, Int32, Put
from llmsched.kernels.triton.attention import LOG2_E, attend_kernel, join_kernel
from llmsched.kernels.triton.tiling import Tiling, list_work, padded

#: Slots that a join reads at a time.
JOIN_CHUNK = 16


class Launch(NamedTuple):
    tiling: Tiling
    items: Tensor
    joins: Tensor
    num_slots: int
    tile_queries: int


class Rope(NamedTuple):
    """Rotary parts of queries and keys beside their other numbers. All KV heads share the rotary part of a key."""

    query: Tensor  # [T, heads, P]
    keys: Tensor  # [num_blocks, 1, block_size, P]
    latent: bool  # True if the other numbers of the keys are the values, and all KV heads share them too


def list_launches(
    bounds: Int32,
    contexts: Int32,
    tilings: Mapping[bool, Tiling],
    group: int,
    *,
    units: int,
    put: Put,
    window: int | None = None,
) -> list[Launch]:
    """Return a launch for all decodes and one for all prefill chunks. A launch without work is left out.

    `tilings` has the tiling for decodes (True) and for prefill chunks (False). `group` is the number of query heads per
    KV head. The other arguments are as in `list_work`.
    """
    lengths, launches = bounds[1:] - bounds[:-1], []
    for decodes, chosen in ((True, lengths == 1), (False, lengths > 1)):
        sequences = np.flatnonzero(chosen).astype(np.int32)
        if not len(sequences):
            continue
        tiling = tilings[decodes]
        found = list_work(
            bounds,
            contexts,
            sequences,
            tile_queries=tiling.block_m // group,
            block_n=tiling.block_n,
            window=window,
            units=units,
            fixed=decodes and len(sequences) == len(contexts),
        )
        launches.append(Launch(tiling, put(found.items), put(found.joins), found.num_slots, found.tile_queries))
    return launches


def launch_attention(
    launches: list[Launch],
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    kv_heads: int,
    rope: Rope | None = None,
    **options: Unpack[AttentionOptions],
) -> None:
    """Write the attention of `query` to `output`, see `reference.paged_attention`."""
    heads, value_dim = query.shape[1], value_cache.shape[3]
    for launch in launches:
        places = launch.num_slots, kv_heads, launch.tiling.block_m
        parts = query.new_empty(*places, value_dim, dtype=torch.float32)
        stats = query.new_empty(*places, 2, dtype=torch.float32)
        tensors = (output, parts, stats, query, key_cache, value_cache, block_tables)
        _attend(launch, tensors, kv_heads, rope, **options)
        if launch.joins.shape[0]:
            join_kernel[(launch.joins.shape[0], heads, launch.tile_queries)](
                output,
                parts,
                stats,
                launch.joins,
                launch.tiling.block_m,
                GROUP=heads // kv_heads,
                KV_HEADS=kv_heads,
                VALUE_DIM=value_dim,
                BLOCK_V=launch.tiling.block_v,
                CHUNK=JOIN_CHUNK,
                enable_fp_fusion=True,
            )


def _attend(
    launch: Launch,
    tensors: tuple[Tensor, ...],
    kv_heads: int,
    rope: Rope | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Launch the kernel. `tensors` are its first seven arguments."""
    _, _, _, query, key_cache, value_cache, block_tables = tensors
    heads, tiling = query.shape[1], launch.tiling
    more = Rope(query, key_cache, latent=False) if rope is None else rope
    rope_dim = 0 if rope is None else rope.keys.shape[3]
    attend_kernel[(launch.items.shape[0] * kv_heads,)](
        *tensors,
        launch.items,
        *(each if each is None else each.contiguous() for each in (sinks, slopes)),
        kv_scales,
        more.query,
        more.keys,
        scale if softcap is not None else scale * LOG2_E.value,
        softcap,
        *query.stride()[:2],
        *more.query.stride()[:2],
        block_tables.shape[1],
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=query.shape[2],
        VALUE_DIM=value_cache.shape[3],
        ROPE_DIM=rope_dim,
        BLOCK_SIZE=value_cache.shape[2],
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=tiling.block_d,
        BLOCK_V=tiling.block_v,
        BLOCK_R=padded(max(1, rope_dim)),
        WINDOW=window or 0,
        LATENT=more.latent,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
