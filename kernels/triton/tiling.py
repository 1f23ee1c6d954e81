"""Division of a step's attention into work items for the programs of a GPU kernel."""
# The tiles of a launch have E units of work for each KV head, so that all KV heads together have two units for each
# multiprocessor. With N keys in all tiles, a unit is N / E keys, or MIN_SPLIT_TOKENS if that is more. The keys of a
# tile are divided into as many items as the tile has whole units, so an item has less than two units. If all tiles are
# equal, all programs run at once. R tiles give at most R + E items. At most E of them need slots, for at most E / 2
# joins.

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from llmsched.kernels.reference import Int32

MIN_PRODUCT = 16  # fewest rows, columns and depth of a tensor-core product
MIN_SPLIT_TOKENS = 256
PROGRAMS_PER_PROCESSOR = 2


class Tiling(NamedTuple):
    block_m: int  # rows: queries x query heads of one KV head
    block_n: int  # keys
    block_d: int  # head size of keys, padded
    block_v: int  # head size of values, padded
    num_warps: int
    num_stages: int


#: Most query heads in a tile of absorbed latent attention, whose outputs are as wide as latent vectors.
MAX_LATENT_HEADS = 32


def latent_group(heads: int) -> int:
    """Return how many query heads share a tile of absorbed latent attention."""
    return max(count for count in range(1, min(heads, MAX_LATENT_HEADS) + 1) if heads % count == 0)


def choose_latent_tiling(*, group: int, rank: int, item_size: int) -> Tiling:
    """Choose the tile sizes for absorbed latent attention to latent vectors of `rank` numbers."""
    block_m, width = max(MIN_PRODUCT, padded(group)), padded(rank)
    if item_size == 4:
        return Tiling(block_m, 16, width, width, num_warps=8, num_stages=1)
    block_n = 32 if width <= 512 else 16
    return Tiling(block_m, block_n, width, width, num_warps=4 if block_m == 16 else 8, num_stages=2)


def choose_expanded_tiling(*, capability: int, head_dim: int, value_dim: int, item_size: int) -> Tiling:
    """Choose the tile sizes for prefill chunks over expanded keys of `head_dim` numbers and a rotary key."""
    sizes = {"capability": capability, "head_dim": head_dim, "value_dim": value_dim, "item_size": item_size}
    tiling = choose_tiling(decodes=False, group=1, **sizes)
    # With a rotary key, registers of the largest tile would spill.
    return tiling._replace(block_m=64) if capability < 89 and tiling.block_m == 128 else tiling


class Item(IntEnum):
    """Column in the array of work items. A work item is a tile of queries with a range of keys."""

    # The queries of an item are consecutive tokens. TABLE is a row of the block tables, and FIRST_POSITION the position
    # of the first query in its sequence. The item has the keys BEGIN to END - 1. SLOT is -1 if these are all keys of
    # the tile. IS_FIRST is 1 for the first item of a tile, else 0. An item without queries has no work.

    TABLE = 0
    FIRST_TOKEN = 1
    NUM_QUERIES = 2
    FIRST_POSITION = 3
    BEGIN = 4
    END = 5
    SLOT = 6
    IS_FIRST = 7


class Join(IntEnum):
    """Column in the array of joins. A join combines the results of the work items of one tile."""

    # The queries of a join are consecutive tokens. A join without queries has no work.

    FIRST_TOKEN = 0
    NUM_QUERIES = 1
    FIRST_SLOT = 2
    NUM_SLOTS = 3


class WorkList(NamedTuple):
    items: Int32  # [W, 8], see Item; one program computes one item for one KV head
    joins: Int32  # [J, 4], see Join
    num_slots: int
    tile_queries: int  # most queries of a tile


class Gpu(NamedTuple):
    num_processors: int  # streaming multiprocessors
    capability: int  # compute capability, such as 89 for 8.9


@cache
def gpu_properties(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, 10 * found.major + found.minor)


def work_units(gpu: Gpu, kv_heads: int) -> int:
    """Return the number of units of work for each KV head of a launch."""
    return -(-PROGRAMS_PER_PROCESSOR * gpu.num_processors // kv_heads)


def choose_tiling(
    *, capability: int, decodes: bool, group: int, head_dim: int, value_dim: int, item_size: int
) -> Tiling:
    """Choose the tile sizes for a launch of decodes or of prefill chunks.

    `group` is the number of query heads per KV head. `item_size` is the bytes of one element of the query.
    """
    block_d, block_v = padded(head_dim), padded(value_dim)
    row_bytes = max(block_d, block_v) * item_size
    if item_size == 4:  # full float32 products run on CUDA cores, not tensor cores, and read registers
        block_m, block_n = max(16, padded(group)), 32 if row_bytes <= 1024 else 16
        return Tiling(block_m, block_n, block_d, block_v, num_warps=4 if row_bytes <= 512 else 8, num_stages=1)
    block_m, block_n = (128, 64) if row_bytes <= 256 else (64, 32) if row_bytes <= 512 else (32, 16)
    block_m = max(16 if decodes else block_m, padded(group))
    # Registers of the largest tiles would spill, unless products can read factors from shared or tensor memory.
    reads_memory = 90 <= capability < 120
    if block_m * row_bytes > (1 << 15) or (block_m * block_n * row_bytes == 1 << 21 and not reads_memory):
        block_n = max(16, block_n // 2)
    num_warps = 4 if decodes and block_m <= 32 else 8
    return Tiling(block_m, block_n, block_d, block_v, num_warps, num_stages=3)  # block ids, keys and values, products


def list_work(
    bounds: Int32,
    contexts: Int32,
    sequences: Int32,
    *,
    tile_queries: int,
    block_n: int,
    window: int | None,
    units: int,
    fixed: bool,
) -> WorkList:
    """List the work of some sequences of a batch, the longest items first.

    `sequences` [S] are indices in the batch. `bounds` [B + 1] and `contexts` [B] are the batch's cu_seqlens_q and
    context_lens. A tile has up to `tile_queries` queries, and the kernel visits `block_n` keys at a time. The keys of a
    long tile are divided among several items, which adds at most `units` items. If `fixed` is True, empty items and
    joins are added, so that all shapes depend only on `units` and the number of tiles.
    """
    lengths = (bounds[1:] - bounds[:-1])[sequences]
    counts = -(-lengths // tile_queries)
    tables, lengths = sequences.repeat(counts), lengths.repeat(counts)
    offsets = (np.arange(len(tables)) - (counts.cumsum() - counts).repeat(counts)) * tile_queries
    queries = np.minimum(lengths - offsets, tile_queries)
    positions = contexts[tables] - lengths + offsets
    ends = positions + queries
    begins = np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)
    keys = ends - begins

    unit = max(MIN_SPLIT_TOKENS, -(-int(keys.sum()) // units))
    size = -(-keys // (np.maximum(keys // unit, 1) * block_n)) * block_n
    pieces = -(-keys // size)  # rounding to whole loops may save an item
    split = pieces > 1
    slots = np.where(split, (pieces * split).cumsum() - pieces, -1)
    whole = np.stack([tables, bounds[tables] + offsets, queries, positions, begins, ends, slots, pieces], axis=1)
    whole = whole.astype(np.int32)

    found, step = whole.repeat(pieces, axis=0), size.repeat(pieces)
    number = np.arange(len(found)) - (pieces.cumsum() - pieces).repeat(pieces)
    found[:, Item.BEGIN] += number * step
    found[:, Item.END] = np.minimum(found[:, Item.BEGIN] + step, found[:, Item.END])
    found[:, Item.SLOT] += number
    found[:, Item.IS_FIRST] = number == 0
    joined = whole[split][:, [Item.FIRST_TOKEN, Item.NUM_QUERIES, Item.SLOT, -1]]
    items = np.zeros((len(whole) + units if fixed else len(found), len(Item)), np.int32)
    items[: len(found)] = found[np.argsort(found[:, Item.BEGIN] - found[:, Item.END], kind="stable")]
    joins = np.zeros((units // 2 if fixed else len(joined), len(Join)), np.int32)
    joins[: len(joined)] = joined
    num_slots = units if fixed else int(pieces[split].sum())
    return WorkList(items, joins, num_slots, int(queries.max()))


def padded(size: int) -> int:
    """Round `size` up to a power of two, and at least to the smallest size of a tensor-core product."""
    return max(MIN_PRODUCT, 1 << (size - 1).bit_length())
