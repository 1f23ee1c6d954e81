"""Sampling on the CPU, without a sort. Each thread samples whole rows."""
# Compiled code compares logits by their `order_key`, an integer. The filters top_k and top_p keep the tokens whose key
# is above a threshold, and the first few tokens whose key equals it. The threshold is found by bisection: first over
# the whole vocabulary, where most chunks of CHUNK tokens lie above or below as a whole, then over the few tokens that
# are left. Then the weights of kept tokens are summed in each chunk, because the chunks race first (see
# `reference.race`).

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from llmsched.kernels import reference
from llmsched.kernels.cpu.compiled import ELEMENTS, EXACT, c_function, exp32, jit, to_float32
from llmsched.kernels.cpu.openmp import arguments_type, as_pointer, own_part, run, thread_num

CHUNK, MIX_0, MIX_1 = reference.CHUNK, reference.MIX_0, reference.MIX_1
MIN_SCORE, WEIGHT_UNITS = np.float32(reference.MIN_SCORE), np.float32(reference.WEIGHT_UNITS)
TEMPERATURE, TOP_K, TOP_P, MIN_P, KEY_0, KEY_1 = (int(each) for each in reference.SamplingParameter)
#: Keys of the infinities. NaN is above the first or below the second.
INFINITY, MINUS_INFINITY = 0x7F800000, -0x7F800001
#: Bisections of the range of scores before candidates are collected.
COARSE_STEPS = 9
#: Tokens that are looked at together while candidates are collected.
RUN = 32
#: Elements from which several threads are faster.
PARALLEL_ELEMENTS = 1 << 15

Arguments = arguments_type(addresses=("logits", "parameters", "weights", "outcomes"), sizes=("num_rows", "width"))
HIGHEST, LOWEST, SUM, ROOM = range(4)  # first index of `chunks`


def sample(logits: Tensor, parameters: Tensor) -> Tensor:
    logits = (logits if logits.dtype in ELEMENTS else logits.float()).contiguous()
    parameters = parameters.contiguous()
    rows, width = logits.shape
    outcomes = torch.empty(rows, dtype=torch.int64)
    draws = bool(parameters[TEMPERATURE].any())
    weights = torch.empty(torch.get_num_threads() if draws else 0, width, dtype=torch.int64)
    addresses = (each.data_ptr() for each in (logits, parameters, weights, outcomes))
    parallel = (rows > 1 or draws) and rows * width >= PARALLEL_ELEMENTS
    run(thread_body(ELEMENTS[logits.dtype]), Arguments(*addresses, rows, width), parallel=parallel)
    return outcomes


@cache
def thread_body(element: np.dtype[Any]) -> Any:
    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        logits = numba.carray(as_pointer(a.logits), (a.num_rows, a.width), element)
        parameters = numba.carray(as_pointer(a.parameters), (6, a.num_rows), np.float64)
        outcomes = numba.carray(as_pointer(a.outcomes), (a.num_rows,), np.int64)
        weights = numba.carray(as_pointer(a.weights), (a.num_threads, a.width), np.int64)
        chunks = np.empty((4, (a.width + CHUNK - 1) // CHUNK), np.int64)
        thread = thread_num()
        first, end = own_part(a.num_rows, thread, a.num_threads)
        for row in range(first, end):
            best = survey(logits[row], chunks)
            if best < 0:
                outcomes[row] = -1
            elif parameters[TEMPERATURE, row] == 0:
                outcomes[row] = best
            else:
                outcomes[row] = draw(logits[row], best, parameters[:, row].copy(), weights[thread], chunks)

    return body


@jit()
def order_key(element: Any) -> Any:
    """Convert a logit to an int32 key. Keys compare like logits, and -0 and 0 have the same key."""
    bits = np.float32(to_float32(element)).view(np.int32)
    key = np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.int32(0) if key == np.int32(-1) else key


@jit()
def survey(logits: Any, chunks: Any) -> int:
    """Return the lowest id with the best logit, or -1 if the best logit is infinite or any logit is NaN.

    The highest and the lowest key of each chunk of the vocabulary are stored in `chunks`.
    """
    width = logits.shape[0]
    best, worst = np.int32(-0x80000000), np.int32(0x7FFFFFFF)
    for chunk in range(chunks.shape[1]):
        part = logits[chunk * CHUNK : min((chunk + 1) * CHUNK, width)]
        high, low = np.int32(-0x80000000), np.int32(0x7FFFFFFF)
        for i in range(part.shape[0]):
            key = order_key(part[i])
            high, low = max(high, key), min(low, key)
        chunks[HIGHEST, chunk], chunks[LOWEST, chunk] = high, low
        best, worst = max(best, high), min(worst, low)
    if best >= INFINITY or best <= MINUS_INFINITY or worst < MINUS_INFINITY:
        return -1
    chunk = 0
    while chunks[HIGHEST, chunk] < best:
        chunk += 1
    token = chunk * CHUNK
    while order_key(logits[token]) < best:
        token += 1
    return token


@jit()
def draw(logits: Any, best: int, parameters: Any, weights: Any, chunks: Any) -> Any:
    """Sample an id from one row. `best` is the id of the row's best logit, and `weights` is scratch memory."""
    temperature, top_k, top_p = np.float32(parameters[TEMPERATURE]), parameters[TOP_K], parameters[TOP_P]
    top, floor = np.float32(to_float32(logits[best])), np.float32(np.log(parameters[MIN_P]))
    weigh(logits, top, temperature, floor, weights, chunks)
    # Tokens below the key `low` have the weight 0.
    low, high = order_key(np.float32(top + MIN_SCORE * temperature)), order_key(logits[best])
    mass, threshold, room = chunks[SUM].sum(), np.int32(-0x80000000), np.int64(0)
    if top_k > 0:
        threshold, before, ties = find_threshold(logits, weights, chunks, low, high, True, np.int64(top_k))
        room, low = min(np.int64(top_k) - before, ties), threshold
        tied = weight_of(from_key(threshold), top, temperature, floor)
        mass = sum_above(logits, weights, chunks, threshold, False) + room * tied
    if top_p < 1:
        wanted = np.int64(np.ceil(top_p * np.float64(mass)))
        nucleus, before, ties = find_threshold(logits, weights, chunks, low, high, False, wanted)
        tied = max(weight_of(from_key(nucleus), top, temperature, floor), np.int64(1))
        needed = (wanted - before + tied - 1) // tied
        room = min(needed, room) if nucleus == threshold else needed
        threshold = nucleus
    tied = weight_of(from_key(threshold), top, temperature, floor)
    cut_sums(logits, weights, chunks, threshold, room, tied)
    first, second = np.int64(parameters[KEY_0]), np.int64(parameters[KEY_1])
    chunk = find_winner(chunks[SUM], CHUNK, first, second)
    start, room = chunk * CHUNK, chunks[ROOM, chunk]
    inside = weights[start : min(start + CHUNK, logits.shape[0])]
    for i in range(inside.shape[0]):
        key = order_key(logits[start + i])
        if key < threshold or (key == threshold and room <= 0):
            inside[i] = 0
        room -= key == threshold
    return start + find_winner(inside, 0, first, second)


@jit(EXACT)
def weight_of(logit: Any, top: Any, temperature: Any, floor: Any) -> Any:
    """Return the weight (int64) of a token, 0 if (logit - top) / temperature is below `floor`."""
    score = np.float32((logit - top) / temperature)
    weight = np.int64(exp32(score) * WEIGHT_UNITS)
    return weight if score >= floor else np.int64(0)


@jit(EXACT)
def weigh(logits: Any, top: Any, temperature: Any, floor: Any, weights: Any, chunks: Any) -> None:
    """Compute the weight of each token, and the sum of the weights in each chunk."""
    for chunk in range(chunks.shape[1]):
        first, end = chunk * CHUNK, min((chunk + 1) * CHUNK, logits.shape[0])
        part, result = logits[first:end], weights[first:end]
        total = np.int64(0)
        for i in range(part.shape[0]):
            weight = weight_of(to_float32(part[i]), top, temperature, floor)
            result[i] = weight
            total += weight
        chunks[SUM, chunk] = total


@jit()
def find_threshold(logits: Any, weights: Any, chunks: Any, low: Any, high: Any, by_count: bool, limit: Any) -> Any:
    """Find the lowest key (see `order_key`) such that the tokens with higher keys weigh less than `limit` together.

    The search runs from the key `low` to `high`, which is the key of the best token. If `by_count` is True,
    all weights are 1. Returns the key, the sum of the weights above it, and the number of tokens that have the key.
    """
    before: Any = np.int64(0)  # the sum above `high`
    for _ in range(COARSE_STEPS):
        middle = order_key(np.float32(from_key(low) * np.float32(0.5) + from_key(high) * np.float32(0.5)))
        middle = np.int32(min(max(middle, low), max(high - 1, low)))
        count = sum_above(logits, weights, chunks, middle, by_count)
        if count < limit:
            high, before = middle, count
        else:
            low = np.int32(middle + 1)
        if low >= high:
            break
    keys, amounts = list_candidates(logits, weights, chunks, low, high, by_count)
    base = before
    while low < high:
        middle = np.int32((np.int64(low) + np.int64(high)) >> 1)
        count = base
        for i in range(keys.shape[0]):
            count = count + (amounts[i] if keys[i] > middle else np.int64(0))
        if count < limit:
            high, before = middle, count
        else:
            low = np.int32(middle + 1)
    return high, before, np.int64((keys == high).sum())


@jit()
def sum_above(logits: Any, weights: Any, chunks: Any, threshold: Any, by_count: bool) -> Any:
    """Return the sum of the weights of tokens whose key is above `threshold`. If `by_count` is True, weights are 1."""
    result = np.int64(0)
    bound = np.int32(threshold)
    for chunk in range(chunks.shape[1]):
        if chunks[HIGHEST, chunk] <= bound:
            continue
        first, end = chunk * CHUNK, min((chunk + 1) * CHUNK, logits.shape[0])
        if chunks[LOWEST, chunk] > bound:
            result += end - first if by_count else chunks[SUM, chunk]
            continue
        part, amounts = logits[first:end], weights[first:end]
        if by_count:
            for i in range(part.shape[0]):
                result += np.int64(order_key(part[i]) > bound)
        else:
            for i in range(part.shape[0]):
                result += amounts[i] if order_key(part[i]) > bound else np.int64(0)
    return result


@jit()
def list_candidates(logits: Any, weights: Any, chunks: Any, low: Any, high: Any, by_count: bool) -> Any:
    """Return the keys and weights of tokens with keys from `low` to `high`. If `by_count` is True, weights are 1."""
    keys, amounts = np.empty(64, np.int32), np.empty(64, np.int64)
    size = 0
    for chunk in range(chunks.shape[1]):
        if chunks[HIGHEST, chunk] < low or chunks[LOWEST, chunk] > high:
            continue
        for first in range(chunk * CHUNK, min((chunk + 1) * CHUNK, logits.shape[0]), RUN):
            part = logits[first : min(first + RUN, logits.shape[0])]
            count = np.int32(0)
            for i in range(part.shape[0]):
                key = order_key(part[i])
                count += np.int32(low <= key) & np.int32(key <= high)
            if count == 0:
                continue
            if size + count > keys.shape[0]:
                keys, amounts = np.append(keys, np.empty_like(keys)), np.append(amounts, np.empty_like(amounts))
            for i in range(part.shape[0]):
                key = order_key(part[i])
                if low <= key <= high:
                    keys[size], amounts[size] = key, np.int64(1) if by_count else weights[first + i]
                    size += 1
    return keys[:size], amounts[:size]


@jit()
def cut_sums(logits: Any, weights: Any, chunks: Any, threshold: Any, room: Any, tied: Any) -> None:
    """Reduce the sum of the weights in each chunk to the weights of tokens that the filters keep."""
    # The filters keep the tokens above `threshold` and the first `room` tokens whose key equals it, each of weight
    # `tied`. Each chunk's ROOM becomes the number of tokens at the threshold that are kept in this chunk and later
    # chunks.
    bound = np.int32(threshold)
    for chunk in range(chunks.shape[1]):
        chunks[ROOM, chunk] = room
        if chunks[HIGHEST, chunk] < bound:
            chunks[SUM, chunk] = 0
        elif chunks[LOWEST, chunk] <= bound:
            first, end = chunk * CHUNK, min((chunk + 1) * CHUNK, logits.shape[0])
            part, amounts = logits[first:end], weights[first:end]
            total, ties = np.int64(0), np.int64(0)
            for i in range(part.shape[0]):
                key = order_key(part[i])
                total += amounts[i] if key > bound else np.int64(0)
                ties += np.int64(key == bound)
            kept = min(room, ties)
            chunks[SUM, chunk] = total + kept * tied
            room -= kept


@jit()
def from_key(key: Any) -> Any:
    """Convert a key from `order_key` back to the float32 value."""
    bits = np.int32(key)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@jit(EXACT)
def find_winner(amounts: Any, name: int, first: Any, second: Any) -> Any:
    """Draw an index at random, in proportion to the weights `amounts`, as `reference.race` does."""
    # The time of index i is hashed from `name` + i and the key (first, second).
    best, largest = 0, -1.0
    for i in range(amounts.shape[0]):
        if amounts[i] > 0:
            mixed = np.int64(name + i) ^ first
            mixed = ((mixed ^ mixed >> 16) * MIX_0) & 0xFFFFFFFF
            mixed = ((mixed ^ mixed >> 15 ^ second) * MIX_1) & 0xFFFFFFFF
            mixed = mixed ^ mixed >> 15
            speed = amounts[i] / -np.log1p(-(mixed + 0.5) * 2.0**-32)
            if speed > largest:
                best, largest = i, speed
    return best
