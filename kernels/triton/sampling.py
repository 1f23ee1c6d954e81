"""Sampling kernel for CUDA, in which one program samples one row without a sort."""
# The filters top_k and top_p keep the tokens whose key (see `order_key`) is above a threshold, and the first few tokens
# whose key equals it. To find the threshold, each pass over the row divides the range of keys by four: 8 passes for
# bfloat16, 16 for other types. Rows that are greedy or have no such filter need no search. The row stays in the GPU's
# L2 cache.

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from llmsched.kernels import reference

TEMPERATURE, TOP_K, TOP_P, MIN_P, KEY_0, KEY_1 = (tl.constexpr(int(each)) for each in reference.SamplingParameter)
MIX_0, MIX_1 = tl.constexpr(reference.MIX_0), tl.constexpr(reference.MIX_1)
MIN_SCORE, WEIGHT_UNITS = tl.constexpr(reference.MIN_SCORE), tl.constexpr(float(reference.WEIGHT_UNITS))
CHUNK = tl.constexpr(reference.CHUNK)
#: Keys of the infinities. NaN is above the first or below the second.
INFINITY, MINUS_INFINITY = tl.constexpr(0x7F800000), tl.constexpr(-0x7F800001)
LOWEST = tl.constexpr(-0x80000000)


@triton.jit
def order_key(value, SHIFT: tl.constexpr):
    """Convert float32 values to int32 keys. Keys compare like the values, and -0 and 0 have the same key."""
    # If the values come from bfloat16, their low 16 bits are 0, and a SHIFT of 16 drops them.
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(key == -1, 0, key) >> SHIFT


@triton.jit
def from_key(key, SHIFT: tl.constexpr):
    """Convert keys from `order_key` back to float32 values."""
    whole = key
    if SHIFT > 0:
        whole = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (whole ^ ((whole >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, places, width):
    return tl.load(logits + places, mask=places < width, other=float("-inf")).to(tl.float32)


@triton.jit
def weigh(values, top, temperature, floor):
    """Return the weights (int64) of tokens, 0 where (value - top) / temperature is below `floor`."""
    scores = (values - top) / temperature
    return tl.where(scores >= floor, (tl.exp(scores) * WEIGHT_UNITS).to(tl.int64), 0)


@triton.jit
def exponential(names, first, second):
    """Return an exponentially distributed random number (float64) for each of `names`, with the key (first, second)."""
    mixed = names.to(tl.int64) ^ first
    mixed = ((mixed ^ (mixed >> 16)) * MIX_0) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15) ^ second) * MIX_1) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 15)
    return -tl.log(1 - (mixed.to(tl.float64) + 0.5) * 2.3283064365386963e-10)


@triton.jit
def find_best(logits, width, BLOCK: tl.constexpr):
    """Return the key of the best logit and the lowest id with this logit.

    The id is -1 if the best logit is infinite or any logit is NaN.
    """
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST, tl.int32)
    worst = tl.full([BLOCK], INFINITY, tl.int32)
    tokens = lanes
    for start in range(0, width, BLOCK):
        keys = order_key(load_logits(logits, start + lanes, width), 0)
        tokens = tl.where(keys > best, start + lanes, tokens)
        best, worst = tl.maximum(best, keys), tl.minimum(worst, keys)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, tokens, 0x7FFFFFFF), 0)
    finite = (top < INFINITY) & (top > MINUS_INFINITY) & (tl.min(worst, 0) >= MINUS_INFINITY)
    return top, tl.where(finite, token, -1)


@triton.jit
def sum_above(
    logits, width, top, temperature, floor, first, second, third,
    SHIFT: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sums of the weights above each of three thresholds. If BY_COUNT is True, all weights are 1."""
    lanes = tl.arange(0, BLOCK)
    sum1, sum2, sum3 = (tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64))
    for start in range(0, width, BLOCK):
        values = load_logits(logits, start + lanes, width)
        keys = order_key(values, SHIFT)
        amounts = tl.full([BLOCK], 1, tl.int64) if BY_COUNT else weigh(values, top, temperature, floor)
        sum1 += tl.where(keys > first, amounts, 0)
        sum2 += tl.where(keys > second, amounts, 0)
        sum3 += tl.where(keys > third, amounts, 0)
    return tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)


@triton.jit
def find_threshold(
    logits, width, top, temperature, floor, low, high, limit,
    SHIFT: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the lowest key above which the weights of tokens sum to less than `limit`.

    The key is searched between the keys `low` and `high`, of which `high` is the best token's. If BY_COUNT is True, all
    weights are 1. Returns the key and the sum of the weights above it.
    """
    before = tl.full([], 0, tl.int64)
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        first, second, third = low + (high - low) // 4, low + (high - low) // 2, low + (high - low) * 3 // 4
        sum1, sum2, sum3 = sum_above(
            logits, width, top, temperature, floor, first, second, third, SHIFT, BY_COUNT, BLOCK
        )
        if sum1 < limit:
            high, before = first, sum1
        elif sum2 < limit:
            low, high, before = first + 1, second, sum2
        elif sum3 < limit:
            low, high, before = second + 1, third, sum3
        else:
            low = third + 1
    return high.to(tl.int32), before


@triton.jit
def count_ties(logits, width, threshold, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tokens have the key `threshold`."""
    lanes = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        keys = order_key(load_logits(logits, start + lanes, width), SHIFT)
        count += ((keys == threshold) & (start + lanes < width)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def apply_filters(
    logits, width, top, temperature, floor, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the key above which top_k and top_p keep all tokens, and how many tokens with this key they keep."""
    low = order_key(top + MIN_SCORE * temperature, SHIFT)  # the weights of tokens below it are 0
    high = order_key(top, SHIFT)
    threshold = tl.full([], LOWEST, tl.int32)
    room = tl.full([], 0, tl.int64)
    if (top_k > 0) | (top_p < 1):
        below = low - 1
        mass, _, _ = sum_above(logits, width, top, temperature, floor, below, below, below, SHIFT, False, BLOCK)
        if top_k > 0:
            limit = top_k.to(tl.int64)
            threshold, before = find_threshold(
                logits, width, top, temperature, floor, low, high, limit, SHIFT, True, BLOCK
            )
            low = threshold
            room = tl.minimum(limit - before, count_ties(logits, width, threshold, SHIFT, BLOCK))
            mass, _, _ = sum_above(
                logits, width, top, temperature, floor, threshold, threshold, threshold, SHIFT, False, BLOCK
            )
            mass += room * weigh(from_key(threshold, SHIFT), top, temperature, floor)
        if top_p < 1:
            limit = tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64)
            nucleus, before = find_threshold(
                logits, width, top, temperature, floor, low, high, limit, SHIFT, False, BLOCK
            )
            weight = tl.maximum(weigh(from_key(nucleus, SHIFT), top, temperature, floor), 1)
            needed = (limit - before + weight - 1) // weight
            room = tl.minimum(needed, room) if (top_k > 0) & (nucleus == threshold) else needed
            threshold = nucleus
    return threshold, room


@triton.jit
def find_chunk(
    logits, width, top, temperature, floor, threshold, room, key_0, key_1, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Draw a chunk of the vocabulary at random, in proportion to the weights of its kept tokens.

    Returns the chunk's index, and the number of tokens in earlier chunks whose key equals `threshold`.
    """
    ROWS: tl.constexpr = BLOCK // CHUNK
    rows = tl.arange(0, ROWS)
    lanes = rows[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tied_weight = weigh(from_key(threshold, SHIFT), top, temperature, floor)
    largest = tl.full([ROWS], -1.0, tl.float64)
    chunks, ties_before = rows, tl.zeros([ROWS], tl.int64)
    num_ties = tl.full([], 0, tl.int64)
    for start in range(0, width, BLOCK):
        values = load_logits(logits, start + lanes, width)
        keys = order_key(values, SHIFT)
        sums = tl.sum(tl.where(keys > threshold, weigh(values, top, temperature, floor), 0), 1)
        ties = tl.sum(((keys == threshold) & (start + lanes < width)).to(tl.int64), 1)
        earlier = num_ties + tl.cumsum(ties, 0) - ties
        kept = tl.minimum(tl.maximum(room - earlier, 0), ties)
        numbers = start // CHUNK + rows
        speeds = (sums + kept * tied_weight).to(tl.float64) / exponential(numbers + CHUNK, key_0, key_1)
        faster = speeds > largest
        chunks, ties_before = tl.where(faster, numbers, chunks), tl.where(faster, earlier, ties_before)
        largest = tl.maximum(largest, speeds)
        num_ties += tl.sum(ties, 0)
    chunk = tl.min(tl.where(largest == tl.max(largest, 0), chunks, 0x7FFFFFFF), 0)
    return chunk, tl.sum(tl.where(chunks == chunk, ties_before, 0), 0)


# Arguments that change from batch to batch must not cause new compilations.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["logits", "parameters", "outcomes"])
def sample_kernel(
    outcomes,  # [num_rows] int64
    logits,  # [num_rows, width]
    parameters,  # [6, num_rows] float64
    num_rows,
    width,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `reference.sample` for one row."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * width
    own = parameters + row
    best, token = find_best(line, width, BLOCK)
    temperature = tl.load(own + TEMPERATURE * num_rows).to(tl.float32)
    if (token >= 0) & (temperature > 0):
        top = from_key(best, 0)
        floor = tl.log(tl.load(own + MIN_P * num_rows)).to(tl.float32)
        top_k, top_p = tl.load(own + TOP_K * num_rows), tl.load(own + TOP_P * num_rows)
        key_0, key_1 = tl.load(own + KEY_0 * num_rows).to(tl.int64), tl.load(own + KEY_1 * num_rows).to(tl.int64)
        threshold, room = apply_filters(line, width, top, temperature, floor, top_k, top_p, SHIFT, BLOCK)
        chunk, ties_before = find_chunk(
            line, width, top, temperature, floor, threshold, room, key_0, key_1, SHIFT, BLOCK
        )
        names = tl.arange(0, CHUNK)
        values = load_logits(line, chunk * CHUNK + names, width)
        keys = order_key(values, SHIFT)
        rank = ties_before + tl.cumsum((keys == threshold).to(tl.int64), 0)
        kept = (keys > threshold) | ((keys == threshold) & (rank <= room))
        weights = tl.where(kept, weigh(values, top, temperature, floor), 0)
        speeds = weights.to(tl.float64) / exponential(names, key_0, key_1)
        token = chunk * CHUNK + tl.min(tl.where(speeds == tl.max(speeds, 0), names, CHUNK), 0)
    tl.store(outcomes + row, token.to(tl.int64))
