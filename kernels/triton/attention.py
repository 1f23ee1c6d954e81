"""Paged attention of packed batches for CUDA, after FlashAttention-2 and flash-decoding."""
# A tile is consecutive queries of one sequence, with all query heads that share one KV head. So even in a decode, the
# query heads fill the rows of a tensor-core product. A work item is one tile with some of its keys. The host lists the
# items of a step (see `tiling`), and each program computes one item for one KV head. A tile whose keys are divided
# among several items has scratch memory for the result of each, a slot, and `join_kernel` joins these results.

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from llmsched.kernels.triton.fp8 import stored

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin_softmax(sinks, heads, real, is_first, BLOCK_M: tl.constexpr):
    """Return the maximum and the sum of exponentials of each row before its first key."""
    # A sink is a key without a value. Only the first item of a tile has it.
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # noqa: SIM102  (decided at compile time)
        if is_first != 0:
            maximum = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    return maximum, total


@triton.jit
def load_keys(
    caches,
    blocks,
    offsets,
    inside,
    kv_head,
    query,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Return the cells of a tile of keys in the caches, the transposed keys, and their transposed rotary parts."""
    key_cache, _, rope_cache = caches
    cells = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + offsets
    rope_key = query  # unused unless ROPE_DIM
    if ROPE_DIM > 0:
        slots = blocks * BLOCK_SIZE + offsets
        rope_dims = tl.arange(0, BLOCK_R)
        rope_key = tl.load(
            rope_cache + slots[None, :] * ROPE_DIM + rope_dims[:, None],
            mask=(rope_dims < ROPE_DIM)[:, None] & inside[None, :],
            other=0.0,
        ).to(query.dtype)
        if LATENT:
            cells = slots
    dims = tl.arange(0, BLOCK_D)
    key = tl.load(
        key_cache + cells[None, :] * HEAD_DIM + dims[:, None],
        mask=(dims < HEAD_DIM)[:, None] & inside[None, :],
        other=0.0,
    ).to(query.dtype)
    return cells, key, rope_key


@triton.jit
def load_values(value_cache, cells, inside, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    dims = tl.arange(0, BLOCK_V)
    return tl.load(
        value_cache + cells[:, None] * VALUE_DIM + dims[None, :],
        mask=inside[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )


@triton.jit
def score_keys(
    query,
    key,
    rope_query,
    rope_key,
    positions,
    keys,
    inside,
    scale,
    softcap,
    slopes,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """Return the scores of a tile of keys, multiplied by log2 e because the kernel uses exp2."""
    scores = tl.dot(query, key, input_precision="ieee")
    if ROPE_DIM > 0:
        scores = tl.dot(rope_query, rope_key, scores, input_precision="ieee")
    scores *= scale
    if softcap is not None:  # softcap * tanh(score / softcap)
        scores = softcap * (1 - 2 / (tl.exp(2 * (scores / softcap)) + 1)) * LOG2_E
    if slopes is not None:
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
    rope_query,
    positions,
    caches,
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
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    LATENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continue the online softmax over keys begin to end - 1. Return the accumulator, maximum and total of each row."""
    # Without MASKED, each row must attend to all of these keys, and their number must be a multiple of BLOCK_N. Without
    # `softcap`, `scale` must contain the factor log2 e.
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < end
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cells, key, rope_key = load_keys(
            caches, blocks, keys % BLOCK_SIZE, inside, kv_head, query,
            KV_HEADS, HEAD_DIM, ROPE_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_R, LATENT,
        )  # fmt: skip
        scores = score_keys(
            query, key, rope_query, rope_key, positions, keys, inside, scale, softcap, slopes, WINDOW, MASKED, ROPE_DIM
        )
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # The maximum is -inf while a row has attended to no key; any finite base works then.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights, decay = tl.exp2(scores - base[:, None]), tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, 1)
        value = tl.trans(key) if LATENT else load_values(caches[1], cells, inside, VALUE_DIM, BLOCK_V).to(query.dtype)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(query.dtype), value, accumulator, input_precision="ieee")
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit
def attend_keys(
    query,
    rope_query,
    heads,
    real,
    positions,
    caches,
    table,
    kv_head,
    is_first,
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
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Compute the online softmax over keys begin to end - 1. Return the accumulator, maximum and total of each row."""
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    maximum, total = begin_softmax(sinks, heads, real, is_first, BLOCK_M)
    falling = None
    if slopes is not None:
        falling = tl.load(slopes + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
    masked_from = begin
    if WINDOW == 0:  # every query attends to the keys up to the first query's position
        masked_from = begin + tl.maximum(tl.minimum(end, first_position + 1) - begin, 0) // BLOCK_N * BLOCK_N
        accumulator, maximum, total = visit_keys(
            accumulator, maximum, total, query, rope_query, positions, caches, table, kv_head, begin, masked_from,
            scale, softcap, falling, KV_HEADS, HEAD_DIM, VALUE_DIM, ROPE_DIM, BLOCK_SIZE, BLOCK_N,
            BLOCK_D, BLOCK_V, BLOCK_R, WINDOW, LATENT, MASKED=False,
        )  # fmt: skip
    accumulator, maximum, total = visit_keys(
        accumulator, maximum, total, query, rope_query, positions, caches, table, kv_head, masked_from, end,
        scale, softcap, falling, KV_HEADS, HEAD_DIM, VALUE_DIM, ROPE_DIM, BLOCK_SIZE, BLOCK_N,
        BLOCK_D, BLOCK_V, BLOCK_R, WINDOW, LATENT, MASKED=True,
    )  # fmt: skip
    return accumulator, maximum, total


@triton.jit
def load_item(items, KV_HEADS: tl.constexpr):
    """Return the KV head of this program, and the columns of its work item (see `tiling.Item`)."""
    kv_head = tl.program_id(0) % KV_HEADS  # innermost, so that long items start first
    item = items + tl.program_id(0) // KV_HEADS * 8
    sequence, first_token, num_queries = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first_position, begin, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    return kv_head, sequence, first_token, num_queries, first_position, begin, end, tl.load(item + 6), tl.load(item + 7)


@triton.jit
def load_rows(vectors, stride, head_stride, tokens, heads, real, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the vectors [BLOCK_M, BLOCK] of a tile, padded with zeros."""
    dims = tl.arange(0, BLOCK)
    return tl.load(
        vectors + tokens[:, None] * stride + heads[:, None] * head_stride + dims[None, :],
        mask=real[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )


@triton.jit
def load_scales(scales, kv_head, KV_HEADS: tl.constexpr, LATENT: tl.constexpr):
    """Return factors for the scores, for the rotary parts of queries, and for the output."""
    # Without scales, all factors are 1. Latent attention has two scales: of the latent vectors, which are keys and
    # values, and of the rotary keys.
    key_scale, value_scale, rope_factor = 1.0, 1.0, 1.0
    if scales is not None:
        key_scale = tl.load(scales if LATENT else scales + kv_head)
        value_scale = key_scale if LATENT else tl.load(scales + KV_HEADS + kv_head)
        if LATENT:
            rope_factor = tl.load(scales + 1) / key_scale
    return key_scale, rope_factor, value_scale


@triton.jit
def store_tile(
    output,
    parts,
    stats,
    accumulator,
    maximum,
    total,
    tokens,
    heads,
    real,
    slot,
    kv_head,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the attention of a tile to the output or, if its keys are divided among several items, to a slot."""
    dims = tl.arange(0, BLOCK_V)
    written = real[:, None] & (dims < VALUE_DIM)[None, :]
    if slot < 0:
        places = output + (tokens * KV_HEADS * GROUP + heads)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(places, (accumulator / total[:, None]).to(output.dtype.element_ty), mask=written)
    else:
        lines = (slot.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(stats + lines * 2, maximum, mask=real)
        tl.store(stats + lines * 2 + 1, total, mask=real)
        tl.store(parts + lines[:, None] * VALUE_DIM + dims[None, :], accumulator, mask=written)


# Arguments that change from batch to batch must not cause new compilations. With ROPE_DIM, queries and keys have more
# numbers, which all heads of the keys share. With LATENT, the keys are also the values, and are stored once for all KV
# heads. Row m of a tile is query m // GROUP of the tile and query head m % GROUP of the KV head.
@triton.jit(do_not_specialize=["max_blocks"], do_not_specialize_on_alignment=["block_tables", "items"])
def attend_kernel(
    output,  # [T, heads, VALUE_DIM]
    parts,  # [slots, KV_HEADS, BLOCK_M, VALUE_DIM] float32: outputs that are not divided by the sum of exponentials
    stats,  # [slots, KV_HEADS, BLOCK_M, 2] float32: maximum (log2) and sum of exponentials
    query,  # [T, heads, HEAD_DIM]
    key_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM]
    value_cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, VALUE_DIM]
    block_tables,  # [B, max_blocks]
    items,  # [W, 8], see `tiling.Item`
    sinks,  # [heads] or None
    slopes,  # [heads] or None
    scales,  # of fp8 caches: [2, KV_HEADS] of keys and values; with LATENT [2], see `load_scales`; or None
    rope_query,  # [T, heads, ROPE_DIM]; unused unless ROPE_DIM
    rope_cache,  # [num_blocks, BLOCK_SIZE, ROPE_DIM]; unused unless ROPE_DIM
    scale,  # of scores; without `softcap` times log2 e
    softcap,  # or None
    query_stride,  # elements from token to token and from head to head
    head_stride,
    rope_stride,
    rope_head_stride,
    max_blocks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Compute one work item for one KV head."""
    kv_head, sequence, first_token, num_queries, position, begin, end, slot, is_first = load_item(items, KV_HEADS)
    if num_queries == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    real = rows < num_queries * GROUP
    tokens, heads = (first_token + rows // GROUP).to(tl.int64), (kv_head * GROUP + rows % GROUP).to(tl.int64)
    key_scale, rope_factor, value_scale = load_scales(scales, kv_head, KV_HEADS, LATENT)
    rows_of_query = load_rows(query, query_stride, head_stride, tokens, heads, real, HEAD_DIM, BLOCK_D)
    rope_rows = rows_of_query  # unused unless ROPE_DIM
    if ROPE_DIM > 0:
        rope_rows = load_rows(rope_query, rope_stride, rope_head_stride, tokens, heads, real, ROPE_DIM, BLOCK_R)
        rope_rows = (rope_rows * rope_factor).to(rows_of_query.dtype)
    accumulator, maximum, total = attend_keys(
        rows_of_query, rope_rows, heads, real, position + rows // GROUP, (key_cache, value_cache, rope_cache),
        block_tables + sequence.to(tl.int64) * max_blocks, kv_head, is_first, sinks, slopes, begin, end, position,
        scale * key_scale, softcap, KV_HEADS, HEAD_DIM, VALUE_DIM, ROPE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
        BLOCK_V, BLOCK_R, WINDOW, LATENT,
    )  # fmt: skip
    store_tile(
        output, parts, stats, accumulator * value_scale, maximum, total, tokens, heads, real, slot, kv_head,
        GROUP, KV_HEADS, VALUE_DIM, BLOCK_M, BLOCK_V,
    )  # fmt: skip


@triton.jit(do_not_specialize=["block_m"], do_not_specialize_on_alignment=["joins"])
def join_kernel(
    output,  # [T, KV_HEADS x GROUP, VALUE_DIM]
    parts,  # [slots, KV_HEADS, block_m, VALUE_DIM] float32
    stats,  # [slots, KV_HEADS, block_m, 2] float32
    joins,  # [J, 4], see `tiling.Join`
    block_m,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Join the results of all work items for one query and head."""
    # The program ids are the numbers of the join, of the query head and of the query in the tile. CHUNK slots at a time
    # are rescaled from their own maxima to the largest maximum of all slots so far.
    head, number = tl.program_id(1), tl.program_id(2)
    join = joins + tl.program_id(0) * 4
    first_token, num_queries, first_slot, num_slots = (
        tl.load(join), tl.load(join + 1), tl.load(join + 2), tl.load(join + 3),
    )  # fmt: skip
    if number >= num_queries:
        return
    value_dims = tl.arange(0, BLOCK_V)
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    accumulator = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, num_slots, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        there = slots < num_slots
        lines = ((first_slot + slots).to(tl.int64) * KV_HEADS + head // GROUP) * block_m + number * GROUP + head % GROUP
        maxima = tl.load(stats + lines * 2, mask=there, other=float("-inf"))
        totals = tl.load(stats + lines * 2 + 1, mask=there, other=0.0)
        part = tl.load(
            parts + lines[:, None] * VALUE_DIM + value_dims[None, :],
            mask=there[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(maxima, 0))
        # The maximum is -inf while a query has attended to no key; any finite base works then.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights, decay = tl.exp2(maxima - base), tl.exp2(maximum - base)
        total = total * decay + tl.sum(totals * weights, 0)
        accumulator = accumulator * decay + tl.sum(part * weights[:, None], 0)
        maximum = new_maximum
    line = (first_token + number).to(tl.int64) * KV_HEADS * GROUP + head
    joined = (accumulator / total).to(output.dtype.element_ty)
    tl.store(output + line * VALUE_DIM + value_dims, joined, mask=value_dims < VALUE_DIM)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "scales"])
def write_kernel(
    new,  # [T, KV_HEADS, DIM]
    cache,  # [num_blocks, KV_HEADS, BLOCK_SIZE, DIM]
    slot_mapping,  # [T] int64
    scales,  # [KV_HEADS]; unused unless FP8
    token_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
):
    """Copy the key or the value of one token and KV head to the cache. Skip negative slots."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    dims = tl.arange(0, BLOCK_D)
    vector = tl.load(new + token * token_stride + head * head_stride + dims, mask=dims < DIM)
    cell = (slot // BLOCK_SIZE * KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    scale = tl.load(scales + head) if FP8 else 1.0
    tl.store(cache + cell * DIM + dims, stored(vector, scale, cache.dtype.element_ty, FP8), mask=dims < DIM)
