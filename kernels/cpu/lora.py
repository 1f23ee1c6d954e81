"""LoRA products on the CPU: torch's products for prefill chunks, and a kernel for the rows of decodes."""
# Decodes of several requests mix adapters, so torch would need a few operations for each of them. The kernel computes
# all these rows in one call, which reads the matrices of each adapter once.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from numba import types
from torch import Tensor

from llmsched.kernels.cpu.compiled import ELEMENTS, c_function, jit, to_float32
from llmsched.kernels.cpu.layer import add, load
from llmsched.kernels.cpu.openmp import arguments_type, as_pointer, barrier, own_part, run, thread_num
from llmsched.kernels.cpu.products import multiply
from llmsched.kernels.lora import LoraMatrices

#: Longest run of tokens with one adapter whose rows the kernel computes. For longer runs, torch is faster.
MAX_RUN = 16
PARALLEL_WEIGHTS = 1 << 15  # weights (about 10 us on one core) from which several threads are faster
#: Types in which the kernel computes.
_WRITTEN_TYPES = (torch.float32, torch.bfloat16)

Arguments = arguments_type(
    addresses=("rows", "a", "b", "items", "spans", "inner", "output"),
    sizes=("num_items", "num_rows", "size", "num_outputs", "num_adapters", "num_spans", "rank", "width"),
)


class Work(NamedTuple):
    runs: list[tuple[int, slice]]  # adapter and tokens of each run that torch computes
    items: Tensor  # int64 [items, 2], adapter and token of each other row, in the order of the adapters


def prepare_lora(
    adapters: npt.NDArray[np.int32], num_adapters: int, put: Callable[[npt.NDArray[np.generic]], Tensor]
) -> Work:
    bounds = np.flatnonzero(np.diff(adapters, prepend=-2, append=-2)).tolist()
    runs = [(int(adapters[first]), slice(first, end)) for first, end in pairwise(bounds) if adapters[first] >= 0]
    few = [(adapter, token) for adapter, run in runs for token in range(run.start, run.stop) if _is_short(run)]
    items = torch.tensor(sorted(few), dtype=torch.int64).view(-1, 2)
    return Work([(adapter, run) for adapter, run in runs if not _is_short(run)], items)


def _is_short(run: slice) -> bool:
    return bool(run.stop - run.start <= MAX_RUN)


def add_lora(output: Tensor, rows: Tensor, matrices: LoraMatrices, work: Work) -> None:
    runs, items = work
    if output.dtype not in _WRITTEN_TYPES:
        runs = [*runs, *((adapter, slice(token, token + 1)) for adapter, token in items.tolist())]
        items = items[:0]
    for adapter, tokens in runs:
        _add_run(output[tokens], rows[tokens], matrices, adapter)
    if not len(items):
        return
    rows = rows.contiguous()
    num_adapters, ranks, size = matrices.a.shape
    _, rank, width = matrices.b.shape
    spans = torch.tensor(matrices.spans, dtype=torch.int64)
    inner = torch.empty(len(items), ranks)
    addresses = (each.data_ptr() for each in (rows, matrices.a, matrices.b, items, spans, inner, output))
    sizes = len(items), len(rows), size, output.shape[1], num_adapters, len(spans), rank, width
    parallel = len(items) * (ranks * size + rank * width) >= PARALLEL_WEIGHTS
    run(rows_body(ELEMENTS[output.dtype]), Arguments(*addresses, *sizes), parallel=parallel)


def _add_run(output: Tensor, rows: Tensor, matrices: LoraMatrices, adapter: int) -> None:
    """Add the LoRA product of one adapter to each row."""
    inner, b = F.linear(rows, matrices.a[adapter]), matrices.b[adapter]
    rank, column = len(b), 0
    for span, (first, width) in enumerate(matrices.spans):
        factor = inner[:, span * rank : (span + 1) * rank]
        output[:, first : first + width].addmm_(factor, b[:, column : column + width])
        column += width


@cache
def rows_body(element: np.dtype[Any]) -> Any:
    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        g = numba.carray(pointer, 1)[0]
        ranks = g.num_spans * g.rank
        rows = numba.carray(as_pointer(g.rows), (g.num_rows, g.size), element)
        a = numba.carray(as_pointer(g.a), (g.num_adapters, ranks, g.size), element)
        b = numba.carray(as_pointer(g.b), (g.num_adapters, g.rank, g.width), element)
        items = numba.carray(as_pointer(g.items), (g.num_items, 2), np.int64)
        spans = numba.carray(as_pointer(g.spans), (g.num_spans, 2), np.int64)
        inner = numba.carray(as_pointer(g.inner), (g.num_items, ranks), np.float32)
        output = numba.carray(as_pointer(g.output), (g.num_rows, g.num_outputs), element)
        row = np.empty(g.size, np.float32)
        first, end = own_part(ranks, thread_num(), g.num_threads)
        for item in range(g.num_items):
            adapter, token = items[item, 0], items[item, 1]
            load(rows[token], row)
            for number in range(first, end, 4):
                stop = min(number + 4, end)
                multiply(a[adapter, number:stop], row, inner[item, number:stop])
        barrier()
        first, end = own_part(g.width, thread_num(), g.num_threads)
        total = np.empty(end - first, np.float32)
        for item in range(g.num_items):
            adapter, token, column = items[item, 0], items[item, 1], 0
            for span in range(g.num_spans):
                begin, stop = max(first, column), min(end, column + spans[span, 1])
                if begin < stop:
                    factors = inner[item, span * g.rank : (span + 1) * g.rank]
                    sums = total[: stop - begin]
                    combine(factors, b[adapter], begin, sums)
                    place = spans[span, 0] + begin - column
                    add(sums, output[token, place : place + stop - begin])
                column += spans[span, 1]

    return body


@jit()
def combine(factors: Any, rows: Any, first: int, total: Any) -> None:
    """Set `total` to the sum of all rows, each times its factor, from column `first` on."""
    for i in range(total.shape[0]):
        total[i] = np.float32(0)
    for number in range(rows.shape[0]):
        factor, row = factors[number], rows[number][first : first + total.shape[0]]
        if factor != 0:  # rows beyond an adapter's rank are zeros
            for i in range(total.shape[0]):
                total[i] += factor * to_float32(row[i])
