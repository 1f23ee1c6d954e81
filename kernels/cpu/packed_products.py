"""Products with packed matrices."""
# Up to MAX_ROWS rows are multiplied by a kernel that unpacks a few rows of the matrix to registers. For more rows,
# tiles of the matrix are unpacked to memory and multiplied by torch. With all matrices of SmolLM2-135M in 4 bits, one
# row takes 0.55 times as long as torch's float32 product on one core, 8 rows 0.35 times, and 32 rows 0.86 times
# (measured).

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from llmsched.kernels.cpu.compiled import (
    ELEMENTS,
    c_function,
    from_bfloat16,
    from_float32,
    jit,
    prefetch_rows,
    put,
    to_float32,
)
from llmsched.kernels.cpu.openmp import address_of, arguments_type, as_pointer, own_part, run, thread_num
from llmsched.kernels.cpu.packed_pairs import multiply_pairs, ordered, scale_fractions
from llmsched.kernels.cpu.packed_vectors import FLOAT_8, INTEGER_4, INTEGER_8, TABLE_4, multiply_tile, unpack_row
from llmsched.kernels.cpu.vectors import MULTIPLIES_BF16
from llmsched.kernels.packed_matrix import BLOCK, TILE_NUMBERS, PackedMatrix

CHUNK = 16  # rows of the matrix that a thread multiplies by all rows before it reads the next
PARALLEL_WEIGHTS = 1 << 15  # weights (about 10 us on one core) from which several threads are faster
#: Rows up to which the kernel is faster than unpacking to memory. Products in 16-bit types have instructions of their
#: own on the CPUs where models are served in these types.
MAX_ROWS = {torch.float32: 64, torch.bfloat16: 16}

_own = threading.local()

Arguments = arguments_type(
    addresses=("rows", "codes", "scales", "offsets", "table", "output", "bias"),
    sizes=("num_rows", "size", "first", "end", "groups", "width"),
)


def linear(rows: Tensor, parts: Sequence[PackedMatrix], bias: Tensor | None) -> Tensor:
    """Compute `reference.linear` for a `weight` that consists of the packed matrices `parts`."""
    output = rows.new_empty(len(rows), sum(len(part.codes) for part in parts))
    few = len(rows) <= MAX_ROWS.get(rows.dtype, 0) and all(len(part.codes) >= CHUNK for part in parts)
    column, written = 0, rows.dtype if rows.dtype in MAX_ROWS else torch.float32
    added = None if bias is None else bias.to(rows.dtype).contiguous()
    for part in parts:
        inputs = rows if part.order is None else rows.index_select(1, part.order)
        multiply, unpack = _bodies_for(part, written)
        if few:
            multiply_packed(multiply, inputs.contiguous(), part, added, output, column)
        else:
            unpack_and_multiply(unpack, written, inputs, part, output[:, column : column + len(part.codes)])
        column += len(part.codes)
    if bias is not None and not few:
        output += bias
    return output


def multiply_packed(
    body: Any, rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, output: Tensor, column: int
) -> None:
    """Write rows @ matrix.T + bias to the columns of `output` from `column` on, for a few rows.

    `body` is a `product_body`. `bias` is of all columns.
    """
    parallel = len(rows) * matrix.codes.numel() >= PARALLEL_WEIGHTS
    start = column * output.itemsize
    addresses = output.data_ptr() + start, 0 if bias is None else bias.data_ptr() + start
    run(body, _arguments(rows, matrix, *addresses, 0, len(matrix.codes), output.shape[1]), parallel=parallel)


def unpack_and_multiply(body: Any, written: torch.dtype, rows: Tensor, matrix: PackedMatrix, output: Tensor) -> None:
    """Write rows @ matrix.T to `output`, for many rows. `body` is an `unpacking_body`, which writes `written`."""
    total, size = len(matrix.codes), rows.shape[1]
    count = max(1, TILE_NUMBERS // size)
    tile = _scratch(count * size, written).view(count, size)
    for first in range(0, total, count):
        end = min(first + count, total)
        arguments = _arguments(rows, matrix, tile.data_ptr(), 0, first, end, size)
        run(body, arguments, parallel=True)
        torch.mm(rows, tile[: end - first].to(rows.dtype).T, out=output[:, first:end])


def _scratch(numbers: int, dtype: torch.dtype) -> Tensor:
    # The calling thread uses this memory again, because new memory costs as much time as it takes to fill.
    whole: Tensor | None = getattr(_own, "scratch", None)
    if whole is None or whole.nbytes < numbers * dtype.itemsize:
        whole = _own.scratch = torch.empty(4 * max(numbers, TILE_NUMBERS), dtype=torch.uint8)
    return whole.view(dtype)[:numbers]


def _arguments(rows: Tensor, matrix: PackedMatrix, output: int, bias: int, first: int, end: int, width: int) -> Any:
    tensors = (rows, matrix.codes, matrix.scales, matrix.offsets, matrix.table)
    sizes = (*rows.shape, first, end, matrix.scales.shape[1], width)
    return Arguments(*map(address_of, tensors), output, bias, *sizes)


def _bodies_for(matrix: PackedMatrix, written: torch.dtype) -> tuple[Any, Any]:
    codes, scales, offsets, table, _ = matrix
    # Codes per group: a row has as many bytes of 4-bit codes as half of its codes.
    group = codes.shape[1] // scales.shape[1] * (1 if codes.dtype.is_signed else 2)
    types = codes.dtype, scales.dtype, None if offsets is None else offsets.dtype
    return bodies(*types, table is not None, group % BLOCK != 0, written)


@cache
def bodies(
    codes: torch.dtype,
    scales: torch.dtype,
    offsets: torch.dtype | None,
    has_table: bool,
    halves: bool,
    written: torch.dtype,
) -> tuple[Any, Any]:
    """Return the compiled functions for few and for many rows. Both are compiled together, so a warm-up compiles both.

    `halves` says that the halves of a block have scales of their own. Otherwise a block has one scale.
    """
    coding = {torch.uint8: TABLE_4 if has_table else INTEGER_4, torch.int8: INTEGER_8}.get(codes, FLOAT_8)
    layout = coding, int(offsets is not None), 2 if halves else 1, ELEMENTS[scales], ELEMENTS[offsets or scales]
    element = ELEMENTS[written]
    return product_body(*layout, element), unpacking_body(*layout, element)


@cache
def product_body(
    coding: int,
    shifted: int,
    groups_in_block: int,
    scale: np.dtype[Any],
    offset: np.dtype[Any],
    element: np.dtype[Any],
) -> Any:
    per_byte = 2 if coding in (INTEGER_4, TABLE_4) else 1
    by_pairs = element == ELEMENTS[torch.bfloat16] and MULTIPLIES_BF16 and coding == INTEGER_4 and groups_in_block == 1
    prepare = ordered if by_pairs else widened
    multiply = chunk_function(by_pairs, coding, shifted, groups_in_block)

    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        rows = numba.carray(as_pointer(a.rows), (a.num_rows, a.size), element)
        codes = numba.carray(as_pointer(a.codes), (a.end, a.size // per_byte), np.int8)
        scales = numba.carray(as_pointer(a.scales), (a.end * a.groups,), scale)
        offsets = numba.carray(as_pointer(a.offsets), (a.end * a.groups,), offset)
        bias = numba.carray(as_pointer(a.bias), (a.width,), element)
        output = numba.carray(as_pointer(a.output), (a.num_rows, a.width), element)
        x, table = prepare(rows, numba.carray(as_pointer(a.table), (1, 16), np.float32))
        count = a.size // BLOCK * groups_in_block // a.groups
        shift, repeat = (0, count) if by_pairs else blocks_of_group(count)
        # Vectors of numbers may reach beyond the last row of the chunk.
        wide_scales = np.zeros((2 * CHUNK, a.groups * repeat), np.float32)
        wide_offsets = np.zeros((2 * CHUNK, a.groups * repeat), np.float32)
        own_scales, own_offsets = wide_scales[:CHUNK].ravel(), wide_offsets[:CHUNK].ravel()
        sums = np.empty(CHUNK, np.float32)
        chunk, stop = own_part((a.end + CHUNK - 1) // CHUNK, thread_num(), a.num_threads)
        while chunk < stop:
            first = min(chunk * CHUNK, a.end - CHUNK)  # the last chunk may overlap the one before
            prefetch_rows(codes, min(first + CHUNK, a.end), min(first + 2 * CHUNK, a.end))
            spread(scales[first * a.groups :], repeat, own_scales)
            if shifted:
                spread(offsets[first * a.groups :], repeat, own_offsets)
            if by_pairs:
                scale_fractions(own_scales, own_offsets, shifted)
            multiply(codes, first, wide_scales, wide_offsets, shift, table, x, sums, bias, a.bias != 0, output)
            chunk += 1

    return body


@cache
def chunk_function(by_pairs: bool, coding: int, shifted: int, groups_in_block: int) -> Callable[..., None]:
    """Return a function that multiplies CHUNK rows of a matrix by all rows, and adds a bias."""
    tile = multiply_pairs if by_pairs else multiply_tile

    @jit()
    def multiply(
        codes: Any, first: int, scales: Any, offsets: Any, shift: int, table: Any, x: Any, sums: Any,
        bias: Any, biased: bool, output: Any,
    ) -> None:  # fmt: skip
        for number in range(0, output.shape[0], 8):
            left = output.shape[0] - number
            count = 1 if left == 1 else 2 if left == 2 else 4 if left <= 4 else 8
            columns = 2 if count == 8 else 4
            for start in range(0, CHUNK, columns):
                row = first + start
                if count == 1:
                    tile(
                        codes, row, scales, offsets, start, shift, table, x, number, sums,
                        1, 4, coding, shifted, groups_in_block,
                    )  # fmt: skip
                elif count == 2:
                    tile(
                        codes, row, scales, offsets, start, shift, table, x, number, sums,
                        2, 4, coding, shifted, groups_in_block,
                    )  # fmt: skip
                elif count == 4:
                    tile(
                        codes, row, scales, offsets, start, shift, table, x, number, sums,
                        4, 4, coding, shifted, groups_in_block,
                    )  # fmt: skip
                else:
                    tile(
                        codes, row, scales, offsets, start, shift, table, x, number, sums,
                        8, 2, coding, shifted, groups_in_block,
                    )  # fmt: skip
                for column in range(columns):
                    added = to_float32(bias[row + column]) if biased else np.float32(0)
                    for each in range(min(count, left)):
                        put(output[number + each], row + column, sums[column * count + each] + added)

    return multiply


@jit()
def widened(rows: Any, table: Any) -> Any:
    """Return rows in float32, and `table`."""
    wide = np.empty(rows.shape, np.float32)
    for row in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            wide[row, i] = to_float32(rows[row, i])
    return wide, table


@cache
def unpacking_body(
    coding: int,
    shifted: int,
    groups_in_block: int,
    scale: np.dtype[Any],
    offset: np.dtype[Any],
    written: np.dtype[Any],
) -> Any:
    per_byte = 2 if coding in (INTEGER_4, TABLE_4) else 1

    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        codes = numba.carray(as_pointer(a.codes), (a.end, a.size // per_byte), np.int8)
        scales = numba.carray(as_pointer(a.scales), (a.end * a.groups,), scale)
        offsets = numba.carray(as_pointer(a.offsets), (a.end * a.groups,), offset)
        table = numba.carray(as_pointer(a.table), (16,), np.float32)
        output = numba.carray(as_pointer(a.output), (a.end - a.first, a.size), written)
        shift, repeat = blocks_of_group(a.size // BLOCK * groups_in_block // a.groups)
        wide_scales = np.empty((1, a.groups * repeat), np.float32)
        wide_offsets = np.empty((1, a.groups * repeat), np.float32)
        unpacked = np.empty((1, a.size), np.float32)
        number, stop = own_part(a.end - a.first, thread_num(), a.num_threads)
        while number < stop:
            row = a.first + number
            spread(scales[row * a.groups :], repeat, wide_scales[0])
            if shifted:
                spread(offsets[row * a.groups :], repeat, wide_offsets[0])
            unpack_row(codes, row, wide_scales, wide_offsets, shift, table, unpacked, coding, shifted, groups_in_block)
            copy(unpacked[0], output[number])
            number += 1

    return body


@jit()
def blocks_of_group(count: int) -> tuple[int, int]:
    """Return (shift, repeat), where count = 2^shift x repeat and `repeat` is odd.

    The scale of block b is number b >> shift in a list that has each scale `repeat` times.
    """
    shift = 0
    while count % 2 == 0:
        shift, count = shift + 1, count // 2
    return shift, count


@jit()
def spread(source: Any, repeat: int, target: Any) -> None:
    """Copy numbers from `source` to `target` as float32, each `repeat` times."""
    if repeat == 1:
        for i in range(target.shape[0]):
            target[i] = from_scale(source[i])
        return
    for i in range(target.shape[0] // repeat):
        value = from_scale(source[i])
        for place in range(i * repeat, (i + 1) * repeat):
            target[place] = value


def from_scale(element: Any) -> Any:
    """Convert a finite number to float32: a float32, or the bits of a bfloat16 (uint16) or a float16 (int16)."""
    raise NotImplementedError("compiled code only")


@overload(from_scale)  # type: ignore[untyped-decorator]
def choose_scale_conversion(element: Any) -> Any:
    return {types.float32: from_float32, types.uint16: from_bfloat16, types.int16: from_finite_float16}[element]


def from_finite_float16(element: Any) -> Any:
    # Unlike from_float16, it has no branches for infinity and NaN, which would take a fifth of a product's time.
    bits = np.uint32(np.uint16(element))
    magnitude = np.uint32(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32)
    magnitude = np.float32(magnitude * np.float32(2.0**112))
    sign = np.uint32(np.uint32(bits & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(magnitude.view(np.uint32) | sign).view(np.float32)


@jit()
def copy(source: Any, target: Any) -> None:
    for i in range(target.shape[0]):
        put(target, i, source[i])
