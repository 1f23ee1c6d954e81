"""How work is cut into tiles on a GPU. Pure arithmetic on shapes: no device is asked, nothing is waited for."""

from __future__ import annotations

from typing import NamedTuple

MIN_PRODUCT = 16  # rows, columns and depth that a tensor-core product has at least
MIN_SPLIT_TOKENS = 256
MAX_SPLITS = 64


class Tiling(NamedTuple):
    """block_m rows (queries x heads of one KV head), block_n keys, heads padded to block_d and block_v."""

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
    """Tiles for a batch; `item_size` is bytes of a query element, `num_processors` the GPU's multiprocessors.

    Only two heights of tiles exist, one for batches of decodes and one for all others, so that few kernels are
    compiled. `max_context` may be an upper bound. There are only as many splits as it takes to give every processor two
    programs.
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
    """The power of two, at least MIN_PRODUCT, that holds `size`."""
    return max(MIN_PRODUCT, 1 << (size - 1).bit_length())
