"""Tile sizes of the attention kernel: how one launch is divided among programs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

MIN_PRODUCT = 16  # fewest rows, columns and depth of a tensor-core product
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


class Tiling(NamedTuple):
    """Sizes of the tiles of one launch: block_m rows (queries x query heads of one KV head) and block_n keys.

    The head size of keys is padded to block_d, the head size of values to block_v. `splits` programs share the keys of
    a tile.
    """

    block_m: int
    block_n: int
    block_d: int
    block_v: int
    splits: int
    num_warps: int
    num_stages: int


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
