"""Attention of sequences with few new tokens (decodes and very short chunks). KV blocks are read in place."""
# A row is one query token. The keys that it attends to are divided into splits of SPLIT tokens. A work item is one
# split of one row and one KV head: it reads each key and value once, converts it to float32 and uses it for all query
# heads of this KV head. It yields each head's maximum score, sum of exponentials and weighted sum of values.
# `join_splits` joins the splits of a row, as in flash-decoding. Every thread gets the same number of items. The splits
# of a row depend on this row alone, so the result of a row is bit for bit the same in every batch.

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from llmsched.kernels.cpu.compiled import ELEMENTS, c_function, exp32, jit, prefetch_rows, put, tanh32, to_float32
from llmsched.kernels.cpu.openmp import (
    address_of,
    arguments_type,
    as_pointer,
    own_part,
    run,
    state,
    thread_num,
    wait_for_all,
)
from llmsched.kernels.cpu.vectors import (
    KEYS,
    MULTIPLIES_BF16,
    WIDTH,
    add_values,
    score_bf16_keys,
    score_keys,
    widen,
)

MAX_ROW_QUERIES = 16  # queries per sequence; for more, matrix products are faster (measured: from 12 to 24 on)
SPLIT = 256
TILE = 64  # keys or values that are converted at a time, so that they stay in the first-level cache
SHARING_HEADS = 8  # query heads of a work item in latent attention
PARALLEL_PRODUCTS = 1 << 18  # multiply-adds (about 15 us on one core) from which several threads are faster

TOKEN, SEQUENCE, START, STOP, FIRST_SPLIT = range(5)  # first index of the array of list_rows
Arguments = arguments_type(
    addresses=(
        *("query", "keys", "values", "tables", "rows", "parts", "stats", "sinks", "slopes", "scales", "output"),
        *("rope_query", "rope_keys"),
    ),
    sizes=(
        *("num_tokens", "heads", "head_dim", "num_blocks", "kv_heads", "block_size", "value_dim", "rope_dim"),
        *("num_sequences", "max_blocks", "num_rows"),
    ),
    floats=("scale", "softcap"),
)


class RowList(NamedTuple):
    rows: Tensor  # int64, result of `list_rows`
    num_splits: int  # of all rows


@jit()
def list_rows(cu_seqlens_q: Any, context_lens: Any, max_queries: int, window: int) -> Any:
    """List the query tokens of all sequences that have at most `max_queries` new tokens.

    Returns an intp array [5, tokens + 1] with one column for each listed token. The last column has only FIRST_SPLIT.
    """
    # With r = the returned array, row i is the token r[TOKEN, i] of sequence r[SEQUENCE, i]. It attends to the keys
    # r[START, i] to r[STOP, i] - 1: the last `window` keys, or all keys if `window` is 0. Its splits are r[FIRST_SPLIT,
    # i] to r[FIRST_SPLIT, i + 1] - 1.
    rows = np.empty((5, cu_seqlens_q[-1] + 1), np.intp)
    count = splits = 0
    for sequence in range(context_lens.shape[0]):
        first, end = cu_seqlens_q[sequence], cu_seqlens_q[sequence + 1]
        if end - first <= max_queries:
            for token in range(first, end):
                stop = context_lens[sequence] - end + token + 1
                start = max(0, stop - window) if window else 0
                rows[TOKEN, count], rows[SEQUENCE, count], rows[FIRST_SPLIT, count] = token, sequence, splits
                rows[START, count], rows[STOP, count] = start, stop
                count += 1
                splits += (stop - start + SPLIT - 1) // SPLIT
    rows[FIRST_SPLIT, count] = splits
    return rows[:, : count + 1].copy()


def attend_rows(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    listed: RowList,
    output: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the attention of the query tokens in `listed` to `output` [tokens, heads, value_dim].

    `query` and `output` have the same type, float32 or bfloat16. `sinks`, `slopes` and `kv_scales` are float32, the
    caches are of a type in ELEMENTS, and `block_tables` are int32. All tensors must be contiguous.

    `rope` is for latent attention, in which the keys of the one KV head are also its values. It has the rotary parts of
    the queries [tokens, heads, P] and of the keys [num_blocks, 1, block_size, P], whose scale is row 1 of `kv_scales`.
    """
    rows, num_splits = listed
    tokens, heads, head_dim = query.shape
    num_blocks, kv_heads, block_size, value_dim = value_cache.shape
    if rope is not None and heads % SHARING_HEADS == 0:  # several threads can then share a split
        kv_heads = heads // SHARING_HEADS
    if state.calls is not None:  # a replay may have longer contexts
        num_splits = (rows.shape[1] - 1) * -(-block_tables.shape[1] * block_size // SPLIT)
    parts, stats = (torch.empty(num_splits, heads, size) for size in (value_dim, 2))
    arguments = Arguments(
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        block_tables.data_ptr(),
        rows.data_ptr(),
        parts.data_ptr(),
        stats.data_ptr(),
        address_of(sinks),
        address_of(slopes),
        address_of(kv_scales),
        output.data_ptr(),
        *((0, 0) if rope is None else (part.data_ptr() for part in rope)),
        tokens,
        heads,
        head_dim,
        num_blocks,
        kv_heads,
        block_size,
        value_dim,
        0 if rope is None else rope[0].shape[2],
        *block_tables.shape,
        rows.shape[1] - 1,
        scale,
        softcap or 0.0,
    )
    products = num_splits * SPLIT * heads * (head_dim + value_dim + arguments.rope_dim)
    body = thread_body(ELEMENTS[query.dtype], ELEMENTS[key_cache.dtype])
    run(body, arguments, parallel=products >= PARALLEL_PRODUCTS)


@cache
def thread_body(element: np.dtype[Any], cached: np.dtype[Any]) -> Any:
    """Compile and return the function that each thread runs."""
    score_heads = bf16_scores if MULTIPLIES_BF16 and element == cached == ELEMENTS[torch.bfloat16] else float_scores

    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        group = a.heads // a.kv_heads
        query = numba.carray(as_pointer(a.query), (a.num_tokens, a.heads, a.head_dim), element)
        output = numba.carray(as_pointer(a.output), (a.num_tokens, a.heads, a.value_dim), element)
        stored_heads = 1 if a.rope_dim > 0 else a.kv_heads
        keys = numba.carray(as_pointer(a.keys), (a.num_blocks, stored_heads, a.block_size, a.head_dim), cached)
        rope_query = numba.carray(as_pointer(a.rope_query), (a.num_tokens, a.heads, a.rope_dim), element)
        rope_keys = numba.carray(as_pointer(a.rope_keys), (a.num_blocks, 1, a.block_size, a.rope_dim), cached)
        values = numba.carray(as_pointer(a.values), (a.num_blocks, stored_heads, a.block_size, a.value_dim), cached)
        tables = numba.carray(as_pointer(a.tables), (a.num_sequences, a.max_blocks), np.int32)
        rows = numba.carray(as_pointer(a.rows), (5, a.num_rows + 1), np.intp)
        num_splits = rows[FIRST_SPLIT, a.num_rows]
        parts = numba.carray(as_pointer(a.parts), (num_splits, a.heads, a.value_dim), np.float32)
        stats = numba.carray(as_pointer(a.stats), (num_splits, a.heads, 2), np.float32)
        sinks = numba.carray(as_pointer(a.sinks), (a.heads,), np.float32)
        slopes = numba.carray(as_pointer(a.slopes), (a.heads,), np.float32)
        scales = numba.carray(as_pointer(a.scales), (2, stored_heads), np.float32)
        weights, rope_weights = np.empty((group, SPLIT), np.float32), np.empty((group, SPLIT), np.float32)
        key_tile, value_tile = np.empty((TILE, a.head_dim), np.float32), np.empty((TILE, a.value_dim), np.float32)
        rope_tile = np.empty((TILE, a.rope_dim), np.float32)
        thread, row, items = thread_num(), 0, num_splits * a.kv_heads
        first, end = own_part(items, thread, a.num_threads)
        for item in range(first, end):
            split, kv_head = item // a.kv_heads, item % a.kv_heads
            while rows[FIRST_SPLIT, row + 1] <= split:
                row += 1
            start = rows[START, row] + (split - rows[FIRST_SPLIT, row]) * SPLIT
            stop = min(start + SPLIT, rows[STOP, row])
            table, token = tables[rows[SEQUENCE, row]], rows[TOKEN, row]
            heads = slice(kv_head * group, (kv_head + 1) * group)
            kv_head = min(kv_head, stored_heads - 1)
            score_heads(query[token, heads], keys, table, kv_head, start, stop, weights, key_tile)
            if a.rope_dim > 0:
                score_heads(rope_query[token, heads], rope_keys, table, kv_head, start, stop, rope_weights, rope_tile)
                ratio = scales[1, kv_head] / scales[0, kv_head] if a.scales != 0 else np.float32(1)
                add_scores(weights, rope_weights, stop - start, ratio)
            scale_scores(weights, stop - start, a.scale * scales[0, kv_head] if a.scales != 0 else a.scale)
            if a.softcap > 0:
                cap_scores(weights, stop - start, a.softcap)
            if a.slopes != 0:
                subtract_alibi(weights, stop - start, slopes[heads], rows[STOP, row] - 1 - start)
            exponentiate(weights, stop - start, stats[split, heads])
            sum_values(weights, values, table, kv_head, start, stop, parts[split, heads], value_tile)
        wait_for_all(a.num_threads)
        of_values = 0 if a.rope_dim > 0 else 1
        first, end = own_part(a.num_rows, thread, a.num_threads)
        for row in range(first, end):
            splits = slice(rows[FIRST_SPLIT, row], rows[FIRST_SPLIT, row + 1])
            for head in range(a.heads):
                sink = sinks[head] if a.sinks != 0 else np.float32(-np.inf)
                scale = scales[of_values, min(head // group, stored_heads - 1)] if a.scales != 0 else np.float32(1)
                join_splits(parts[splits, head], stats[splits, head], sink, scale, output[rows[TOKEN, row], head])

    return body


@jit()
def float_scores(
    query: Any, keys: Any, table: Any, kv_head: int, start: int, stop: int, scores: Any, tile: Any
) -> None:
    """Set scores[h, p - start] to query[h] . key at position p, for p from start to stop - 1."""
    score_split(widened(query), keys, table, kv_head, start, stop, scores, tile)


@jit()
def bf16_scores(query: Any, keys: Any, table: Any, kv_head: int, start: int, stop: int, scores: Any, tile: Any) -> None:
    """Do the same as `float_scores` for queries and keys of bfloat16."""
    if query.shape[1] % WIDTH == 0:
        score_bf16_split(query, widened(query), keys, table, kv_head, start, stop, scores)
    else:
        score_split(widened(query), keys, table, kv_head, start, stop, scores, tile)


@jit()
def widened(query: Any) -> Any:
    """Return queries [heads, D] in float32."""
    queries = np.empty(query.shape, np.float32)
    for head in range(query.shape[0]):
        for d in range(query.shape[1]):
            queries[head, d] = to_float32(query[head, d])
    return queries


@jit()
def convert_tile(cache: Any, table: Any, kv_head: int, begin: int, end: int, stop: int, tile: Any) -> None:
    """Convert a KV head's keys or values at positions begin to end - 1 to float32, and write them to `tile`."""
    # Each iteration prefetches a row of the next block, but of no block after position stop - 1. Prefetching all rows
    # at once would saturate the memory bus.
    block_size = cache.shape[2]
    last_block = (stop - 1) // block_size
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first = block * block_size
        vectors = cache[table[block], kv_head]
        ahead = cache[table[min(block + 1, last_block)], kv_head]
        for place in range(max(begin - first, 0), min(end - first, block_size)):
            prefetch_rows(ahead, place, place + 1)
            convert(vectors, place, tile, first + place - begin)


def convert(vectors: Any, number: int, tile: Any, row: int) -> None:
    raise NotImplementedError("compiled code only")


@overload(convert)  # type: ignore[untyped-decorator]
def choose_convert(vectors: Any, number: Any, tile: Any, row: Any) -> Any:
    def convert_any(vectors: Any, number: Any, tile: Any, row: Any) -> None:
        for d in range(tile.shape[1]):
            tile[row, d] = to_float32(vectors[number, d])

    def convert_fast(vectors: Any, number: Any, tile: Any, row: Any) -> None:
        if tile.shape[1] % WIDTH == 0:
            widen(vectors, number, tile, row)
        else:
            for d in range(tile.shape[1]):
                tile[row, d] = to_float32(vectors[number, d])

    return convert_any if vectors.dtype == types.int16 else convert_fast


@jit()
def score_split(query: Any, keys: Any, table: Any, kv_head: int, start: int, stop: int, scores: Any, tile: Any) -> None:
    """Do the same as `float_scores` for queries of float32."""
    for begin in range(start, stop, TILE):
        end = min(begin + TILE, stop)
        convert_tile(keys, table, kv_head, begin, end, stop, tile)
        for head in range(query.shape[0]):
            key = 0
            if query.shape[1] % WIDTH == 0:
                while key + KEYS <= end - begin:
                    score_keys(query, head, tile, key, scores, begin - start + key)
                    key += KEYS
            while key < end - begin:
                total = np.float32(0)
                for d in range(query.shape[1]):
                    total += query[head, d] * tile[key, d]
                scores[head, begin - start + key] = total
                key += 1


@jit()
def score_bf16_split(
    bits: Any, query: Any, keys: Any, table: Any, kv_head: int, start: int, stop: int, scores: Any
) -> None:
    """Do the same as `score_split`. `keys` and `bits`, the queries, are bfloat16."""
    block_size = keys.shape[2]
    last_block = (stop - 1) // block_size
    for block in range(start // block_size, last_block + 1):
        first = block * block_size
        vectors = keys[table[block], kv_head]
        ahead = keys[table[min(block + 1, last_block)], kv_head]
        low, high = max(start - first, 0), min(stop - first, block_size)
        prefetch_rows(ahead, 0, high)
        if high - low < KEYS:
            for head in range(query.shape[0]):
                for key in range(low, high):
                    total = np.float32(0)
                    for d in range(query.shape[1]):
                        total += query[head, d] * to_float32(vectors[key, d])
                    scores[head, first + key - start] = total
        else:
            for begin in range(low, high, KEYS):
                key = min(begin, high - KEYS)  # some of the last keys are computed twice
                for head in range(query.shape[0]):
                    score_bf16_keys(bits, head, vectors, key, scores, first + key - start)


@jit()
def add_scores(scores: Any, others: Any, length: int, factor: Any) -> None:
    """Add `factor` x `others` to the first `length` scores of each head."""
    for head in range(scores.shape[0]):
        for i in range(length):
            scores[head, i] += factor * others[head, i]


@jit()
def scale_scores(scores: Any, length: int, factor: Any) -> None:
    for head in range(scores.shape[0]):
        for i in range(length):
            scores[head, i] *= factor


@jit()
def cap_scores(scores: Any, length: int, softcap: Any) -> None:
    for head in range(scores.shape[0]):
        for i in range(length):
            scores[head, i] = softcap * tanh32(scores[head, i] / softcap)


@jit()
def subtract_alibi(scores: Any, length: int, slopes: Any, distance: int) -> None:
    """Lower each score by the head's slope times the distance between query and key in tokens."""
    # `distance` is the distance of the first key.
    for head in range(scores.shape[0]):
        slope = slopes[head]
        for i in range(length):
            scores[head, i] -= slope * np.float32(distance - i)


@jit()
def exponentiate(scores: Any, length: int, stats: Any) -> None:
    """Replace each score by exp(score - maximum of the head). Set stats[head] to (maximum, sum of the exponentials)."""
    for head in range(scores.shape[0]):
        maximum = np.float32(-np.inf)
        for i in range(length):
            maximum = scores[head, i] if scores[head, i] > maximum else maximum
        total = np.float32(0)
        for i in range(length):
            scores[head, i] = exp32(scores[head, i] - maximum)
            total += scores[head, i]
        stats[head, 0] = maximum
        stats[head, 1] = total


@jit()
def sum_values(
    weights: Any, values: Any, table: Any, kv_head: int, start: int, stop: int, output: Any, tile: Any
) -> None:
    """Set output[h] to the sum of weights[h, p - start] * (value at position p), for p from start to stop - 1."""
    output[:] = 0
    for begin in range(start, stop, TILE):
        end = min(begin + TILE, stop)
        convert_tile(values, table, kv_head, begin, end, stop, tile)
        for head in range(output.shape[0]):
            if output.shape[1] % WIDTH == 0:
                add_values(weights, head, begin - start, tile, end - begin, output)
            else:
                for key in range(end - begin):
                    for d in range(output.shape[1]):
                        output[head, d] += weights[head, begin - start + key] * tile[key, d]


@jit()
def join_splits(parts: Any, stats: Any, sink: Any, scale: Any, output: Any) -> None:
    """Write one head's output: scale x the sum of weighted values in all splits / the sum of exponentials."""
    # All exponentials are first rescaled to the largest maximum. A sink adds only to the sum of exponentials.
    maximum = sink
    for split in range(stats.shape[0]):
        maximum = max(maximum, stats[split, 0])
    total = np.exp(sink - maximum)
    for split in range(stats.shape[0]):
        stats[split, 0] = np.exp(stats[split, 0] - maximum)
        total += stats[split, 0] * stats[split, 1]
    for d in range(output.shape[0]):
        result = np.float32(0)
        for split in range(stats.shape[0]):
            result += stats[split, 0] * parts[split, d]
        put(output, d, result / total * scale)
