"""Tile sizes for the attention kernel. Pure arithmetic on shapes: it never asks or waits for a device."""

from __future__ import annotations

from typing import NamedTuple

MIN_PRODUCT = 16  # least rows, columns and depth of a tensor-core product
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


class Tiling(NamedTuple):
    """Tile of block_m rows (queries x heads of one KV head) and block_n keys; head dims padded to block_d, block_v."""

    block_m: int
    block_n: int
    block_d: int
    block_v: int
    splits: int
    num_warps: int
    num_stages: int


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
    """Return the tiles for a batch.

    `item_size` is bytes per query element, `num_processors` the GPU's multiprocessors; `max_context` may be an upper
    bound. Only two tile heights exist, one for batches of decodes and one for all others, so that few kernels are
    compiled. There are just enough splits to give every processor two programs.
    """
    block_d, block_v = padded(head_dim), padded(value_dim)
    row_bytes = max(block_d, block_v) * item_size
    decodes_only = num_tokens <= num_sequences
    if item_size == 4:  # full float32 products run on the ordinary cores, from registers
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
    """Return the smallest power of two that is at least `size` and MIN_PRODUCT."""
    return max(MIN_PRODUCT, 1 << (size - 1).bit_length())
