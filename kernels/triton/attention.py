"""Paged attention of packed batches for CUDA, after FlashAttention-2 and flash-decoding.

Each program computes one tile: consecutive queries of one sequence, with all query heads that share one KV head. So
even in a decode, the query heads fill the rows of a tensor-core product.

Each program finds the sequence of its tile on the device, so the host never waits for the lengths. The tiles of
sequence b have the numbers from cu_seqlens_q[b] // TILE_QUERIES + b on, so there are enough numbers for the tiles of
earlier sequences. Programs whose number belongs to no tile end at once. If a batch has few tiles, the keys of each tile
are divided into splits for separate programs, and `join_kernel` joins their results.
"""

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(cu_seqlens_q, tile, num_sequences, TILE_QUERIES: tl.constexpr):
    """Return the index of the sequence to which the tile number `tile` belongs, by binary search.

    This is the last sequence whose first tile has a number of at most `tile`.
    """
    low = tl.full([], 0, tl.int32)
    high = num_sequences.to(tl.int32)
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // TILE_QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def locate_tile(cu_seqlens_q, tile, num_sequences, TILE_QUERIES: tl.constexpr):
    """Return (sequence, its first token, its number of queries, first query of the tile).

    The first query of the tile is counted from the sequence's first query.
    """
    sequence = find_sequence(cu_seqlens_q, tile, num_sequences, TILE_QUERIES)
    first_token = tl.load(cu_seqlens_q + sequence)
    q_len = tl.load(cu_seqlens_q + sequence + 1) - first_token
    return sequence, first_token, q_len, (tile - (first_token // TILE_QUERIES + sequence)) * TILE_QUERIES


@triton.jit
def split_range(first_position, num_queries, split, splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first key of a split, and the position after its last key.

    The tile has `num_queries` consecutive queries, the first at `first_position`.
    """
    first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else 0
    end_key = first_position + num_queries
    length = tl.cdiv(tl.cdiv(end_key - first_key, BLOCK_N), splits) * BLOCK_N
    begin = first_key + split * length
    return begin, tl.minimum(begin + length, end_key)


@triton.jit
def begin_softmax(sinks, heads, real, split, BLOCK_M: tl.constexpr, SINKS: tl.constexpr):
    """Return each row's maximum and sum of exponentials before the first key. A sink is a key without a value."""
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # noqa: SIM102  (SINKS is decided at compile time)
        if split == 0:
            maximum = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    return maximum, total


@triton.jit
def score_keys(
    query,
    key,
    positions,
    keys,
    inside,
    scale,
    softcap,
    slopes,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the scores of a tile of keys, multiplied by log2 e, so that exp2 of them gives the softmax's exponentials.

    If MASKED, the score is -inf for a key that a row does not attend to.
    """
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if SOFTCAP:  # softcap * tanh(score / softcap)
        scores = softcap * (1 - 2 / (tl.exp(2 * (scores / softcap)) + 1)) * LOG2_E
    if SLOPES:
        scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
    if MASKED:
        visible = inside[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def visit_keys(
    accumulator,
    maximum,
    total,
    query,
    positions,
    key_cache,
    value_cache,
    table,
    kv_head,
    begin,
    end,
    scale,
    softcap,
    slopes,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continue the online softmax over the keys begin to end - 1. Return accumulator, maximum and total of each row.

    Unless MASKED, each row must attend to all of these keys, and their number must be a multiple of BLOCK_N. Unless
    SOFTCAP, `scale` must contain the factor log2 e.
    """
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < end
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cells = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        key = tl.load(
            key_cache + cells[None, :] * HEAD_DIM + dims[:, None],
            mask=(dims < HEAD_DIM)[:, None] & inside[None, :],
            other=0.0,
        ).to(query.dtype)
        scores = score_keys(
            query, key, positions, keys, inside, scale, softcap, slopes, WINDOW, SOFTCAP, SLOPES, MASKED
        )
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # The maximum is -inf while a row has attended to no key; any finite base works then.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights, decay = tl.exp2(scores - base[:, None]), tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, 1)
        value = tl.load(
            value_cache + cells[:, None] * VALUE_DIM + value_dims[None, :],
            mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        ).to(query.dtype)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(query.dtype), value, accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit
def attend_keys(
    query,
    query_stride,
    head_stride,
    tokens,
    heads,
    real,
    positions,
    key_cache,
    value_cache,
    table,
    kv_head,
    split,
    sinks,
    slopes,
    begin,
    end,
    first_position,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Compute the attention of a tile's rows over the keys begin to end - 1. Return the same as `visit_keys`."""
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(
        query + tokens[:, None] * query_stride + heads[:, None] * head_stride + dims[None, :],
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    maximum, total = begin_softmax(sinks, heads, real, split, BLOCK_M, SINKS)
    falling = maximum
    if SLOPES:
        falling = tl.load(slopes + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
    masked_from = begin
    if WINDOW == 0:  # every query attends to the keys up to the first query's position
        masked_from = begin + tl.maximum(tl.minimum(end, first_position + 1) - begin, 0) // BLOCK_N * BLOCK_N
        accumulator, maximum, total = visit_keys(
            accumulator, maximum, total, q, positions, key_cache, value_cache, table, kv_head, begin, masked_from,
            scale, softcap, falling, KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_V,
            WINDOW, SOFTCAP, SLOPES, MASKED=False,
        )  # fmt: skip
    accumulator, maximum, total = visit_keys(
        accumulator, maximum, total, q, positions, key_cache, value_cache, table, kv_head, masked_from, end,
        scale, softcap, falling, KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, BLOCK_V,
        WINDOW, SOFTCAP, SLOPES, MASKED=True,
    )  # fmt: skip
    return accumulator, maximum, total


@triton.jit
def store_rows(
    output,
    stats,
    accumulator,
    maximum,
    total,
    lines,
    real,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Store the outputs of the `real` rows (others are padding) at their `lines`. A line is one head of one token.

    If SPLIT, outputs are not divided by the sum of exponentials, and `stats` gets each row's maximum and sum.
    """
    value_dims = tl.arange(0, BLOCK_V)
    if SPLIT:
        tl.store(stats + lines * 2, maximum, mask=real)
        tl.store(stats + lines * 2 + 1, total, mask=real)
    else:
        accumulator = accumulator / total[:, None]
    tl.store(
        output + lines[:, None] * VALUE_DIM + value_dims[None, :],
        accumulator.to(output.dtype.element_ty),
        mask=real[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


# Arguments that change from batch to batch must not cause new compilations.
@triton.jit(
    do_not_specialize=["num_sequences", "max_blocks", "splits"],
    do_not_specialize_on_alignment=["block_tables", "cu_seqlens_q", "context_lens"],
)
def attend_kernel(
    output,  # [T, heads, VALUE_DIM]; if SPLIT: [T, heads, splits, VALUE_DIM] float32
    stats,  # [T, heads, splits, 2] float32: maximum (log2) and sum of exponentials; unused unless SPLIT
    query,  # [T, heads, HEAD_DIM]
    key_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, VALUE_DIM]
    block_tables,  # [num_sequences, max_blocks]
    cu_seqlens_q,  # [num_sequences + 1]
    context_lens,  # [num_sequences]
    sinks,  # [heads]; unused unless SINKS
    slopes,  # [heads]; unused unless SLOPES
    scale,
    softcap,
    query_stride,  # elements from token to token and from head to head
    head_stride,
    num_sequences,
    max_blocks,
    splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute the attention of one tile and KV head over one split of the keys.

    The program ids are the numbers of the tile, the KV head and the split. Row m of a tile is query m // GROUP of the
    tile and query head m % GROUP of the KV head.
    """
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first_token, q_len, tile_start = locate_tile(cu_seqlens_q, tile, num_sequences, TILE_QUERIES)
    if tile_start >= q_len:
        return

    rows = tl.arange(0, BLOCK_M)
    queries = tile_start + rows // GROUP
    real = (queries < q_len) & (rows < TILE_QUERIES * GROUP)
    tokens, heads = (first_token + queries).to(tl.int64), kv_head * GROUP + rows % GROUP
    first_position = tl.load(context_lens + sequence) - q_len + tile_start
    positions = first_position + rows // GROUP
    num_queries = tl.minimum(TILE_QUERIES, q_len - tile_start)
    begin, end = split_range(first_position, num_queries, split, splits, BLOCK_N, WINDOW)
    table = block_tables + sequence.to(tl.int64) * max_blocks
    accumulator, maximum, total = attend_keys(
        query, query_stride, head_stride, tokens, heads, real, positions, key_cache, value_cache, table, kv_head, split,
        sinks, slopes, begin, end, first_position, scale, softcap, KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_M,
        BLOCK_N, BLOCK_D, BLOCK_V, WINDOW, SOFTCAP, SINKS, SLOPES,
    )  # fmt: skip
    lines = (tokens * KV_HEADS * GROUP + heads) * splits + split
    store_rows(output, stats, accumulator, maximum, total, lines, real, VALUE_DIM, BLOCK_V, SPLIT)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    output,  # [lines, VALUE_DIM]; a line is one head of one token
    parts,  # [lines, splits, VALUE_DIM] float32
    stats,  # [lines, splits, 2] float32
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Join the splits of one line (one head of one token). The number of the line is the program id.

    Each split is rescaled from its own maximum to the largest maximum of all splits.
    """
    line = tl.program_id(0).to(tl.int64)
    numbers, value_dims = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_V)
    there = numbers < splits
    places = line * splits + numbers
    maxima = tl.load(stats + places * 2, mask=there, other=float("-inf"))
    totals = tl.load(stats + places * 2 + 1, mask=there, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, 0))
    part = tl.load(
        parts + places[:, None] * VALUE_DIM + value_dims[None, :],
        mask=there[:, None] & (value_dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    joined = tl.sum(part * weights[:, None], 0) / tl.sum(totals * weights, 0)
    tl.store(output + line * VALUE_DIM + value_dims, joined.to(output.dtype.element_ty), mask=value_dims < VALUE_DIM)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_kernel(
    new,  # [T, KV_HEADS, DIM]
    cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, DIM]
    slot_mapping,  # [T] int64
    token_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy the key or value vector of one token and KV head (the program ids) to the cache. Skip negative slots."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    dims = tl.arange(0, BLOCK_D)
    vector = tl.load(new + token * token_stride + head * head_stride + dims, mask=dims < DIM)
    cell = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    tl.store(cache + cell * DIM + dims, vector.to(cache.dtype.element_ty), mask=dims < DIM)
