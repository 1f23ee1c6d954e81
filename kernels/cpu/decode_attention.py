"""Attention of sequences with few queries (decodes and very short chunks), which reads KV blocks in place.

A row is one query token. The keys that it attends to are divided into splits of SPLIT tokens. Each split yields its
maximum score, its sum of exponentials and its weighted sum of values. `join_splits` joins the splits of a row, as in
flash-decoding. Every thread gets the same number of splits. The splits of a row depend on this row alone, so the
result of a row is bit for bit the same in every batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import types
from torch import Tensor

from llmsched.kernels.cpu.compiled import ELEMENTS, c_function, exp32, jit, prefetch_rows, tanh32, to_float32
from llmsched.kernels.cpu.openmp import as_pointer, run, thread_num

MAX_ROW_QUERIES = 16  # queries per sequence; for more, matrix products are faster (measured: from 12 to 24 on)
SPLIT = 256
PARALLEL_PRODUCTS = 1 << 20  # multiply-adds (0.05 ms on one core) from which several threads are faster

TOKEN, SEQUENCE, START, STOP, FIRST_SPLIT = range(5)  # first index of the array of list_rows
ADDRESSES = ("query", "keys", "values", "tables", "rows", "parts", "stats", "slopes")
SIZES = (
    "num_threads",
    "num_tokens",
    "heads",
    "head_dim",
    "num_blocks",
    "kv_heads",
    "block_size",
    "value_dim",
    "num_sequences",
    "max_blocks",
    "num_rows",
    "num_splits",
    "has_slopes",
)
ARGUMENTS = np.dtype(
    [(name, np.intp) for name in ADDRESSES + SIZES] + [("scale", np.float32), ("softcap", np.float32)], align=True
)


@jit()
def list_rows(cu_seqlens_q: Any, context_lens: Any, max_queries: int, window: int) -> Any:
    """List the query tokens of all sequences with at most max_queries of them, as an array [5, rows + 1] of intp.

    With r = the returned array, row i is the token r[TOKEN, i] of sequence r[SEQUENCE, i]. It attends to the keys
    r[START, i] to r[STOP, i] - 1: the last `window` keys, or all keys if `window` is 0. Its splits are r[FIRST_SPLIT,
    i] to r[FIRST_SPLIT, i + 1] - 1.
    """
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
    bounds: npt.NDArray[np.int32],
    contexts: npt.NDArray[np.int32],
    output: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    """Compute attention for the sequences with at most MAX_ROW_QUERIES queries and write it to `output`.

    `output` is [tokens, heads, value_dim]; the tokens of other sequences do not change. `output`, `sinks` and `slopes`
    are float32, the caches have a dtype in ELEMENTS, and `block_tables` are int32. `bounds` are the values of
    cu_seqlens_q. All tensors but `query` and `block_tables` must be contiguous.
    """
    rows = list_rows(bounds, contexts, MAX_ROW_QUERIES, window or 0)
    if rows.shape[1] == 1:
        return
    query, block_tables = query.detach().float().contiguous(), block_tables.contiguous()
    num_splits = int(rows[FIRST_SPLIT, -1])
    heads, head_dim, value_dim = query.shape[1], query.shape[2], value_cache.shape[3]
    parts = torch.empty(num_splits, heads, value_dim)
    stats = torch.empty(num_splits, heads, 2)
    tensors = (query, key_cache, value_cache, block_tables)
    own = (parts, stats, stats if slopes is None else slopes)
    addresses = (*(t.data_ptr() for t in tensors), rows.ctypes.data, *(t.data_ptr() for t in own))
    sizes = (0, *query.shape, *value_cache.shape, *block_tables.shape, rows.shape[1] - 1, num_splits)
    sizes = (*sizes, int(slopes is not None))
    arguments = np.array((*addresses, *sizes, scale, softcap or 0.0), ARGUMENTS)
    products = num_splits * SPLIT * heads * (head_dim + value_dim)
    run(thread_body(ELEMENTS[key_cache.dtype]), arguments, parallel=products >= PARALLEL_PRODUCTS)
    if sinks is None:
        sinks = torch.full((heads,), -torch.inf)
    join_splits(parts.numpy(), stats.numpy(), rows, sinks.numpy(), output.numpy())


@cache
def thread_body(element: np.dtype[Any]) -> Any:
    """Return the function that each thread runs, compiled for a cache with this type of elements."""

    @c_function(types.CPointer(numba.from_dtype(ARGUMENTS)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        query = numba.carray(as_pointer(a.query), (a.num_tokens, a.heads, a.head_dim), np.float32)
        keys = numba.carray(as_pointer(a.keys), (a.num_blocks, a.kv_heads, a.block_size, a.head_dim), element)
        values = numba.carray(as_pointer(a.values), (a.num_blocks, a.kv_heads, a.block_size, a.value_dim), element)
        tables = numba.carray(as_pointer(a.tables), (a.num_sequences, a.max_blocks), np.int32)
        rows = numba.carray(as_pointer(a.rows), (5, a.num_rows + 1), np.intp)
        parts = numba.carray(as_pointer(a.parts), (a.num_splits, a.heads, a.value_dim), np.float32)
        stats = numba.carray(as_pointer(a.stats), (a.num_splits, a.heads, 2), np.float32)
        slopes = numba.carray(as_pointer(a.slopes), (a.heads,), np.float32)
        weights = np.empty((a.heads, SPLIT), np.float32)
        thread = thread_num()
        row = 0
        for split in range(a.num_splits * thread // a.num_threads, a.num_splits * (thread + 1) // a.num_threads):
            while rows[FIRST_SPLIT, row + 1] <= split:
                row += 1
            start = rows[START, row] + (split - rows[FIRST_SPLIT, row]) * SPLIT
            stop = min(start + SPLIT, rows[STOP, row])
            table = tables[rows[SEQUENCE, row]]
            score_split(query[rows[TOKEN, row]], keys, table, start, stop, a.scale, weights)
            if a.softcap > 0:
                cap_scores(weights, stop - start, a.softcap)
            if a.has_slopes:
                subtract_alibi(weights, stop - start, slopes, rows[STOP, row] - 1 - start)
            exponentiate(weights, stop - start, stats[split])
            sum_values(weights, values, table, start, stop, parts[split])

    return body


@jit()
def score_split(query: Any, keys: Any, table: Any, start: int, stop: int, scale: Any, scores: Any) -> None:
    """Set scores[h, p - start] to scale * (query[h] . key p), for each position p from start to stop - 1."""
    kv_heads, block_size = keys.shape[1], keys.shape[2]
    group = query.shape[0] // kv_heads
    last_block = (stop - 1) // block_size
    for block in range(start // block_size, last_block + 1):
        begin, end = max(start, block * block_size), min(stop, (block + 1) * block_size)
        offset = begin - block * block_size
        for kv_head in range(kv_heads):
            ahead = keys[table[min(block + 1, last_block)], kv_head]
            heads = slice(kv_head * group, (kv_head + 1) * group)
            score_block(
                query[heads],
                keys[table[block], kv_head, offset : offset + end - begin],
                scale,
                scores[heads, begin - start : end - start],
                ahead,
            )


@jit()
def score_block(query: Any, keys: Any, scale: Any, scores: Any, ahead: Any) -> None:
    """Set scores to scale * query keys^T. Four keys at a time share one load of a query vector.

    Each iteration prefetches a part of the block `ahead`, because prefetching all at once would saturate the memory
    bus.
    """
    length = keys.shape[0]
    for head in range(query.shape[0]):
        key = 0
        while key + 4 <= length:
            if head == 0:
                prefetch_rows(ahead, key, key + 4)
            sum0, sum1, sum2, sum3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for d in range(query.shape[1]):
                x = query[head, d]
                sum0 += x * to_float32(keys[key, d])
                sum1 += x * to_float32(keys[key + 1, d])
                sum2 += x * to_float32(keys[key + 2, d])
                sum3 += x * to_float32(keys[key + 3, d])
            scores[head, key] = sum0 * scale
            scores[head, key + 1] = sum1 * scale
            scores[head, key + 2] = sum2 * scale
            scores[head, key + 3] = sum3 * scale
            key += 4
        while key < length:
            sum0 = np.float32(0)
            for d in range(query.shape[1]):
                sum0 += query[head, d] * to_float32(keys[key, d])
            scores[head, key] = sum0 * scale
            key += 1


@jit()
def cap_scores(scores: Any, length: int, softcap: Any) -> None:
    for head in range(scores.shape[0]):
        for i in range(length):
            scores[head, i] = softcap * tanh32(scores[head, i] / softcap)


@jit()
def subtract_alibi(scores: Any, length: int, slopes: Any, distance: int) -> None:
    """Lower each score by the head's slope times the distance of the key from the query.

    `distance` is the distance of the first key, in tokens.
    """
    for head in range(scores.shape[0]):
        slope = slopes[head]
        for i in range(length):
            scores[head, i] -= slope * np.float32(distance - i)


@jit()
def exponentiate(scores: Any, length: int, stats: Any) -> None:
    """Replace each score by exp(score - maximum of its head). stats[head] gets (maximum, sum of the results)."""
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
def sum_values(weights: Any, values: Any, table: Any, start: int, stop: int, output: Any) -> None:
    """Set output[h] to the sum of weights[h, p - start] * value p over the positions p from start to stop - 1."""
    kv_heads, block_size = values.shape[1], values.shape[2]
    group = output.shape[0] // kv_heads
    last_block = (stop - 1) // block_size
    output[:] = 0
    for block in range(start // block_size, last_block + 1):
        begin, end = max(start, block * block_size), min(stop, (block + 1) * block_size)
        offset = begin - block * block_size
        for kv_head in range(kv_heads):
            ahead = values[table[min(block + 1, last_block)], kv_head]
            heads = slice(kv_head * group, (kv_head + 1) * group)
            add_block(
                weights[heads, begin - start : end - start],
                values[table[block], kv_head, offset : offset + end - begin],
                output[heads],
                ahead,
            )


@jit()
def add_block(weights: Any, values: Any, output: Any, ahead: Any) -> None:
    """Add the product of weights and values to output. Four values at a time share one load and store of output.

    Each iteration prefetches a part of the block `ahead`.
    """
    length = values.shape[0]
    for head in range(output.shape[0]):
        key = 0
        while key + 4 <= length:
            if head == 0:
                prefetch_rows(ahead, key, key + 4)
            w0, w1, w2, w3 = weights[head, key], weights[head, key + 1], weights[head, key + 2], weights[head, key + 3]
            for d in range(output.shape[1]):
                output[head, d] += (
                    w0 * to_float32(values[key, d])
                    + w1 * to_float32(values[key + 1, d])
                    + w2 * to_float32(values[key + 2, d])
                    + w3 * to_float32(values[key + 3, d])
                )
            key += 4
        while key < length:
            for d in range(output.shape[1]):
                output[head, d] += weights[head, key] * to_float32(values[key, d])
            key += 1


@jit()
def join_splits(parts: Any, stats: Any, rows: Any, sinks: Any, output: Any) -> None:
    """Write each row's output: the sum of its splits' weighted values, divided by the sum of all exponentials.

    All exponentials are first rescaled to the row's largest maximum. A sink adds only to the sum of exponentials.
    """
    _, heads, value_dim = parts.shape
    for row in range(rows.shape[1] - 1):
        first, end = rows[FIRST_SPLIT, row], rows[FIRST_SPLIT, row + 1]
        for head in range(heads):
            maximum = max(sinks[head], stats[first:end, head, 0].max())
            total = np.exp(sinks[head] - maximum)
            result = output[rows[TOKEN, row], head]
            result[:] = 0
            for split in range(first, end):
                weight = np.exp(stats[split, head, 0] - maximum)
                total += weight * stats[split, head, 1]
                for d in range(value_dim):
                    result[d] += weight * parts[split, head, d]
            for d in range(value_dim):
                result[d] /= total
