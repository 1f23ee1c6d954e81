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
def begin_softmax(sinks, heads, real, is_first, BLOCK_M: tl.constexpr, SINKS: tl.constexpr):
    """Return the maximum and the sum of exponentials with which each row starts: those of its sink, if it has one."""
    # A sink is a key without a value. Only the first item of a tile has it.
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # noqa: SIM102  (SINKS is decided at compile time)
        if is_first != 0:
            maximum = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    return maximum, total


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
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    MASKED: tl.constexpr,
    ROPE_DIM: tl.constexpr,
):
    """Return the scores of a tile of keys, multiplied by log2 e because the kernel uses exp2."""
    scores = tl.dot(query, key, input_precision="ieee")
    if ROPE_DIM > 0:
        scores = tl.dot(rope_query, rope_key, scores, input_precision="ieee")
    scores *= scale
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
    rope_query,
    positions,
    key_cache,
    value_cache,
    rope_cache,
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
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    LATENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continue the online softmax over keys begin to end - 1. Return the accumulator, maximum and total of each row."""
    # Without MASKED, each row must attend to all of these keys, and their number must be a multiple of BLOCK_N. Without
    # SOFTCAP, `scale` must contain the factor log2 e.
    dims, value_dims, rope_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    for start in range(begin, end, BLOCK_N):
        rope_key = rope_query  # unused unless ROPE_DIM
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < end
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        cells = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + keys % BLOCK_SIZE
        if ROPE_DIM > 0:
            slots = blocks * BLOCK_SIZE + keys % BLOCK_SIZE
            rope_key = tl.load(
                rope_cache + slots[None, :] * ROPE_DIM + rope_dims[:, None],
                mask=(rope_dims < ROPE_DIM)[:, None] & inside[None, :],
                other=0.0,
            ).to(query.dtype)
            if LATENT:
                cells = slots
        key = tl.load(
            key_cache + cells[None, :] * HEAD_DIM + dims[:, None],
            mask=(dims < HEAD_DIM)[:, None] & inside[None, :],
            other=0.0,
        ).to(query.dtype)
        scores = score_keys(
            query, key, rope_query, rope_key, positions, keys, inside, scale, softcap, slopes,
            WINDOW, SOFTCAP, SLOPES, MASKED, ROPE_DIM,
        )  # fmt: skip
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # The maximum is -inf while a row has attended to no key; any finite base works then.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights, decay = tl.exp2(scores - base[:, None]), tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, 1)
        if LATENT:
            value = tl.trans(key)
        else:
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
    rope_query,
    rope_stride,
    rope_head_stride,
    rope_factor,
    tokens,
    heads,
    real,
    positions,
    key_cache,
    value_cache,
    rope_cache,
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
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Compute the online softmax over keys begin to end - 1. Return the accumulator, maximum and total of each row."""
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(
        query + tokens[:, None] * query_stride + heads[:, None] * head_stride + dims[None, :],
        mask=real[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    q_rope = q  # unused unless ROPE_DIM
    if ROPE_DIM > 0:
        rope_dims = tl.arange(0, BLOCK_R)
        q_rope = tl.load(
            rope_query + tokens[:, None] * rope_stride + heads[:, None] * rope_head_stride + rope_dims[None, :],
            mask=real[:, None] & (rope_dims < ROPE_DIM)[None, :],
            other=0.0,
        )
        q_rope = (q_rope * rope_factor).to(q.dtype)
    accumulator = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    maximum, total = begin_softmax(sinks, heads, real, is_first, BLOCK_M, SINKS)
    falling = maximum
    if SLOPES:
        falling = tl.load(slopes + heads, mask=real, other=0.0).to(tl.float32) * LOG2_E
    masked_from = begin
    if WINDOW == 0:  # every query attends to the keys up to the first query's position
        masked_from = begin + tl.maximum(tl.minimum(end, first_position + 1) - begin, 0) // BLOCK_N * BLOCK_N
        accumulator, maximum, total = visit_keys(
            accumulator, maximum, total, q, q_rope, positions, key_cache, value_cache, rope_cache, table, kv_head,
            begin, masked_from, scale, softcap, falling, KV_HEADS, HEAD_DIM, VALUE_DIM, ROPE_DIM, BLOCK_SIZE, BLOCK_N,
            BLOCK_D, BLOCK_V, BLOCK_R, WINDOW, SOFTCAP, SLOPES, LATENT, MASKED=False,
        )  # fmt: skip
    accumulator, maximum, total = visit_keys(
        accumulator, maximum, total, q, q_rope, positions, key_cache, value_cache, rope_cache, table, kv_head,
        masked_from, end, scale, softcap, falling, KV_HEADS, HEAD_DIM, VALUE_DIM, ROPE_DIM, BLOCK_SIZE, BLOCK_N,
        BLOCK_D, BLOCK_V, BLOCK_R, WINDOW, SOFTCAP, SLOPES, LATENT, MASKED=True,
    )  # fmt: skip
    return accumulator, maximum, total


# Arguments that change from batch to batch must not cause new compilations.
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
    sinks,  # [heads]; unused unless SINKS
    slopes,  # [heads]; unused unless SLOPES
    scales,  # [2, KV_HEADS] of keys and values; unused unless FP8
    rope_query,  # [T, heads, ROPE_DIM]; unused unless ROPE_DIM
    rope_cache,  # [num_blocks, BLOCK_SIZE, ROPE_DIM]; unused unless ROPE_DIM
    scale,
    softcap,
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
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SLOPES: tl.constexpr,
    LATENT: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute one work item for one KV head."""
    # With ROPE_DIM, queries and keys have more numbers, which all heads of the keys share. With LATENT, the keys are
    # also the values, and are stored once for all KV heads. Scales are then [2], of the keys and of the numbers added.
    # Row m of a tile is query m // GROUP of the tile and query head m % GROUP of the KV head.
    kv_head = tl.program_id(0) % KV_HEADS  # innermost, so that long items start first
    item = items + tl.program_id(0) // KV_HEADS * 8
    sequence, first_token, num_queries = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first_position, begin, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    slot, is_first = tl.load(item + 6), tl.load(item + 7)
    if num_queries == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    real = rows < num_queries * GROUP
    tokens = (first_token + rows // GROUP).to(tl.int64)
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    positions = first_position + rows // GROUP
    table = block_tables + sequence.to(tl.int64) * max_blocks
    rope_factor, value_scale = 1.0, 1.0
    if FP8:
        key_scale = tl.load(scales if LATENT else scales + kv_head)
        value_scale = key_scale if LATENT else tl.load(scales + KV_HEADS + kv_head)
        scale *= key_scale
        if LATENT:
            rope_factor = tl.load(scales + 1) / key_scale
    accumulator, maximum, total = attend_keys(
        query, query_stride, head_stride, rope_query, rope_stride, rope_head_stride, rope_factor, tokens, heads, real,
        positions, key_cache, value_cache, rope_cache, table, kv_head, is_first, sinks, slopes, begin, end,
        first_position, scale, softcap, KV_HEADS, HEAD_DIM, VALUE_DIM, ROPE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
        BLOCK_V, BLOCK_R, WINDOW, SOFTCAP, SINKS, SLOPES, LATENT,
    )  # fmt: skip
    if FP8:
        accumulator *= value_scale
    value_dims = tl.arange(0, BLOCK_V)
    written = real[:, None] & (value_dims < VALUE_DIM)[None, :]
    if slot < 0:
        places = output + (tokens * KV_HEADS * GROUP + heads)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(places, (accumulator / total[:, None]).to(output.dtype.element_ty), mask=written)
    else:
        lines = (slot.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + rows
        tl.store(stats + lines * 2, maximum, mask=real)
        tl.store(stats + lines * 2 + 1, total, mask=real)
        tl.store(parts + lines[:, None] * VALUE_DIM + value_dims[None, :], accumulator, mask=written)


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
