"""Products with packed matrices of 4-bit or 8-bit codes."""
# Up to MAX_ROWS rows are multiplied by a kernel that unpacks a few rows of the matrix to registers. For more rows,
# tiles of the matrix are unpacked to memory and multiplied by torch. With all matrices of SmolLM2-135M in 4 bits, one
# row takes 0.55 times as long as torch's float32 product on one core, 8 rows 0.35 times, and 32 rows 0.86 times
# (measured).

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor

from llmsched.kernels import reference
from llmsched.kernels.cpu.compiled import ELEMENTS, c_function, from_float32, jit, prefetch_rows, put
from llmsched.kernels.cpu.openmp import address_of, arguments_type, as_pointer, own_part, run, thread_num
from llmsched.kernels.cpu.vectors import (
    LANES,
    VECTOR,
    address,
    broadcast,
    columns,
    load,
    multiply_add,
    sum_each,
)
from llmsched.kernels.packed_matrix import BLOCK, TILE_NUMBERS, PackedMatrix

CHUNK = 16  # rows of the matrix that a thread multiplies by all rows before it reads the next
PARALLEL_WEIGHTS = 1 << 15  # weights (about 10 us on one core) from which several threads are faster
#: Rows up to which the kernel is faster than unpacking to memory. Products in 16-bit types have instructions of their
#: own on the CPUs where models are served in these types.
MAX_ROWS = {torch.float32: 64, torch.bfloat16: 16}

_BYTES, _INTEGERS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(32), LANES)

_own = threading.local()

Arguments = arguments_type(
    addresses=("rows", "codes", "scales", "offsets", "output"),
    sizes=("num_rows", "size", "first", "end", "groups", "width"),
)


def linear(rows: Tensor, parts: Sequence[PackedMatrix], bias: Tensor | None) -> Tensor:
    """Compute `reference.linear` for a `weight` that consists of the packed matrices `parts`."""
    if not all(map(_is_compiled, parts)):
        return reference.linear(rows, parts, bias)
    output = rows.new_empty(len(rows), sum(len(part.codes) for part in parts))
    few = len(rows) <= MAX_ROWS.get(rows.dtype, 0) and all(len(part.codes) >= CHUNK for part in parts)
    computed, found = (rows.float().contiguous(), output.float()) if few else (rows, output)
    column = 0
    for part in parts:
        (multiply_packed if few else unpack_and_multiply)(computed, part, found[:, column : column + len(part.codes)])
        column += len(part.codes)
    if bias is not None:
        found += bias
    return found.to(rows.dtype)


def _is_compiled(matrix: PackedMatrix) -> bool:
    codes, scales, offsets, table, order = matrix
    types = scales.dtype in (torch.float16, torch.float32) and (offsets is None or offsets.dtype == scales.dtype)
    group = matrix.shape[1] // scales.shape[1]
    return codes.dtype != torch.float8_e4m3fn and types and table is order is None and group in (16, 32)


def multiply_packed(rows: Tensor, matrix: PackedMatrix, output: Tensor) -> None:
    """Write rows @ matrix.T to `output`, for a few float32 rows."""
    # Rows of `output` may be parts of longer rows.
    parallel = len(rows) * matrix.codes.numel() >= PARALLEL_WEIGHTS
    arguments = _arguments(rows, matrix, output, 0, len(matrix.codes), output.stride(0))
    run(product_body(*_variant(matrix)), arguments, parallel=parallel)


def unpack_and_multiply(rows: Tensor, matrix: PackedMatrix, output: Tensor) -> None:
    """Write rows @ matrix.T to `output`, for many rows."""
    total, size = matrix.shape
    count = max(1, TILE_NUMBERS // size)
    written = rows.dtype if rows.dtype in MAX_ROWS else torch.float32
    tile = _scratch(count * size, written).view(count, size)
    for first in range(0, total, count):
        end = min(first + count, total)
        arguments = _arguments(rows, matrix, tile, first, end, size)
        run(unpacking_body(*_variant(matrix), ELEMENTS[written]), arguments, parallel=True)
        torch.mm(rows, tile[: end - first].to(rows.dtype).T, out=output[:, first:end])


def _scratch(numbers: int, dtype: torch.dtype) -> Tensor:
    # The calling thread uses this memory again, because new memory costs as much time as it takes to fill.
    whole: Tensor | None = getattr(_own, "scratch", None)
    if whole is None or whole.nbytes < numbers * dtype.itemsize:
        whole = _own.scratch = torch.empty(4 * max(numbers, TILE_NUMBERS), dtype=torch.uint8)
    return whole.view(dtype)[:numbers]


def _variant(matrix: PackedMatrix) -> tuple[int, int, int, Any]:
    groups_in_block = matrix.scales.shape[1] * BLOCK // matrix.shape[1]
    return matrix.bits, int(matrix.offsets is not None), groups_in_block, ELEMENTS[matrix.scales.dtype]


def _arguments(rows: Tensor, matrix: PackedMatrix, output: Tensor, first: int, end: int, width: int) -> Any:
    addresses = (rows, matrix.codes, matrix.scales, matrix.offsets, output)
    sizes = (len(rows), matrix.shape[1], first, end, matrix.scales.shape[1], width)
    return Arguments(*map(address_of, addresses), *sizes)


@cache
def product_body(bits: int, shifted: int, groups_in_block: int, element: np.dtype[Any]) -> Any:
    code, per_byte = (np.uint8, 2) if bits == 4 else (np.int8, 1)

    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        rows = numba.carray(as_pointer(a.rows), (a.num_rows, a.size), np.float32)
        codes = numba.carray(as_pointer(a.codes), (a.end, a.size // per_byte), code)
        scales = numba.carray(as_pointer(a.scales), (a.end * a.groups,), element)
        offsets = numba.carray(as_pointer(a.offsets), (a.end * a.groups,), element)
        output = numba.carray(as_pointer(a.output), (a.num_rows, a.width), np.float32)
        wide_scales = np.empty((CHUNK, a.groups), np.float32)
        wide_offsets = np.empty((CHUNK, a.groups), np.float32)
        sums = np.empty(CHUNK, np.float32)
        chunk, stop = own_part((a.end + CHUNK - 1) // CHUNK, thread_num(), a.num_threads)
        while chunk < stop:
            first = min(chunk * CHUNK, a.end - CHUNK)  # the last chunk may overlap the one before
            prefetch_rows(codes, min(first + CHUNK, a.end), min(first + 2 * CHUNK, a.end))
            copy_as_float32(scales[first * a.groups :], wide_scales.ravel())
            if shifted:
                copy_as_float32(offsets[first * a.groups :], wide_offsets.ravel())
            number = 0
            while number < a.num_rows:
                left = a.num_rows - number
                count = 1 if left == 1 else 2 if left == 2 else 4 if left <= 4 else 8
                columns = 2 if count == 8 else 4
                for start in range(0, CHUNK, columns):
                    row = first + start
                    if count == 1:
                        multiply_tile(
                            codes, row, wide_scales, wide_offsets, start, rows, number, sums,
                            1, 4, shifted, groups_in_block,
                        )  # fmt: skip
                    elif count == 2:
                        multiply_tile(
                            codes, row, wide_scales, wide_offsets, start, rows, number, sums,
                            2, 4, shifted, groups_in_block,
                        )  # fmt: skip
                    elif count == 4:
                        multiply_tile(
                            codes, row, wide_scales, wide_offsets, start, rows, number, sums,
                            4, 4, shifted, groups_in_block,
                        )  # fmt: skip
                    else:
                        multiply_tile(
                            codes, row, wide_scales, wide_offsets, start, rows, number, sums,
                            8, 2, shifted, groups_in_block,
                        )  # fmt: skip
                    for column in range(columns):
                        for each in range(min(count, left)):
                            output[number + each, row + column] = sums[column * count + each]
                number += count
            chunk += 1

    return body


@cache
def unpacking_body(
    bits: int, shifted: int, groups_in_block: int, element: np.dtype[Any], written: np.dtype[Any]
) -> Any:
    code, per_byte = (np.uint8, 2) if bits == 4 else (np.int8, 1)

    @c_function(types.CPointer(numba.from_dtype(Arguments.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        codes = numba.carray(as_pointer(a.codes), (a.end, a.size // per_byte), code)
        scales = numba.carray(as_pointer(a.scales), (a.end * a.groups,), element)
        offsets = numba.carray(as_pointer(a.offsets), (a.end * a.groups,), element)
        output = numba.carray(as_pointer(a.output), (a.end - a.first, a.size), written)
        wide_scales = np.empty((1, a.groups), np.float32)
        wide_offsets = np.empty((1, a.groups), np.float32)
        unpacked = np.empty((1, a.size), np.float32)
        number, stop = own_part(a.end - a.first, thread_num(), a.num_threads)
        while number < stop:
            row = a.first + number
            copy_as_float32(scales[row * a.groups :], wide_scales[0])
            if shifted:
                copy_as_float32(offsets[row * a.groups :], wide_offsets[0])
            unpack_row(codes, row, wide_scales, wide_offsets, unpacked, shifted, groups_in_block)
            copy(unpacked[0], output[number])
            number += 1

    return body


@jit()
def copy_as_float32(source: Any, target: Any) -> None:
    for i in range(target.shape[0]):
        target[i] = from_scale(source[i])


def from_scale(element: Any) -> Any:
    """Convert a finite number to float32: a float32, or the bits of a float16 (int16)."""
    raise NotImplementedError("compiled code only")


@overload(from_scale)  # type: ignore[untyped-decorator]
def choose_scale_conversion(element: Any) -> Any:
    return {types.float32: from_float32, types.int16: from_finite_float16}[element]


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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any,
    codes: Any,
    first: Any,
    scales: Any,
    offsets: Any,
    start: Any,
    rows: Any,
    number: Any,
    sums: Any,
    count: Any,
    num_columns: Any,
    shifted: Any,
    groups_in_block: Any,
) -> Any:
    """Multiply `count` of `rows`, from `number` on, by `num_columns` rows of the matrix `codes`, from `first` on.

    `sums` gets the products with row `first` of the matrix, then those with the next row, and so on. Rows `start`,
    `start` + 1, ... of `scales` and `offsets` (float32) are those of the matrix's rows `first`, `first` + 1, ...
    """
    # If fewer rows are left than `count`, the last row is multiplied again in place of the missing rows.
    how_many, how_many_columns = count.literal_value, num_columns.literal_value
    layout = Layout(codes.dtype, bool(shifted.literal_value), groups_in_block.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, first, scales, offsets, start, rows, number, sums, *_ = args
        kinds = signature.args
        size = columns(context, builder, kinds[5], rows)
        index = size.type
        num_rows = builder.sdiv(context.make_array(kinds[5])(context, builder, rows).nitems, size)
        last = builder.sub(num_rows, index(1))
        inputs = []
        for each in range(how_many):
            row = builder.add(number, index(each))
            row = builder.select(builder.icmp_signed("<", row, last), row, last)
            inputs.append(address(context, builder, kinds[5], rows, row))
        packed = []
        for each in range(how_many_columns):
            row, place = builder.add(first, index(each)), builder.add(start, index(each))
            found = (address(context, builder, kinds[2], scales, place), None)
            if layout.shifted:
                found = (found[0], address(context, builder, kinds[3], offsets, place))
            packed.append((address(context, builder, kinds[0], codes, row), *found))
        zeros = ir.Constant(VECTOR, None)
        totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(how_many_columns * how_many)]
        with cgutils.for_range(builder, builder.sdiv(size, index(BLOCK))) as loop:
            halves = [builder.add(builder.mul(loop.index, index(BLOCK)), index(half)) for half in (0, LANES)]
            xs = [[load(builder, row, place) for place in halves] for row in inputs]
            for column, pointers in enumerate(packed):
                for half, weights in enumerate(layout.weights(builder, loop.index, *pointers)):
                    for x, total in zip(xs, totals[column * how_many :], strict=False):
                        builder.store(multiply_add(builder, weights, x[half], builder.load(total)), total)
        found = sum_each(builder, [builder.load(total) for total in totals])
        target = context.make_array(kinds[7])(context, builder, sums).data
        builder.store(found, builder.bitcast(target, found.type.as_pointer()), align=4)
        return context.get_dummy_value()

    numbers = (codes, types.intp, scales, offsets, types.intp, rows, types.intp, sums)
    return types.void(*numbers, count, num_columns, shifted, groups_in_block), codegen


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def unpack_row(
    typing_context: Any,
    codes: Any,
    row: Any,
    scales: Any,
    offsets: Any,
    target: Any,
    shifted: Any,
    groups_in_block: Any,
) -> Any:
    """Dequantise row `row` of the packed matrix `codes` to `target` [1, N], float32.

    `scales` and `offsets` are those of this row, float32 [1, groups].
    """
    layout = Layout(codes.dtype, bool(shifted.literal_value), groups_in_block.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, row, scales, offsets, target, *_ = args
        kinds = signature.args
        size = columns(context, builder, kinds[4], target)
        index = size.type
        scale, offset, written = (
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip(kinds[2:5], (scales, offsets, target), strict=True)
        )
        code = address(context, builder, kinds[0], codes, row)
        with cgutils.for_range(builder, builder.sdiv(size, index(BLOCK))) as loop:
            for half, weights in enumerate(layout.weights(builder, loop.index, code, scale, offset)):
                place = builder.add(builder.mul(loop.index, index(BLOCK)), index(half * LANES))
                pointer = builder.bitcast(builder.gep(written, [place]), VECTOR.as_pointer())
                builder.store(weights, pointer, align=4)
        return context.get_dummy_value()

    return types.void(codes, types.intp, scales, offsets, target, shifted, groups_in_block), codegen


class Layout(NamedTuple):
    """Layout of the codes in a packed matrix."""

    code: Any
    shifted: bool
    groups_in_block: int

    def weights(self, builder: Any, block: Any, codes: Any, scales: Any, offsets: Any) -> Iterator[Any]:
        """Yield the weights in block number `block` of a matrix row, as two vectors.

        `codes`, `scales` and `offsets` point to the data of this row.
        """
        index, pairs = block.type, None

        def integers(place: Any) -> Any:
            return builder.load(builder.bitcast(builder.gep(codes, [place]), _BYTES.as_pointer()), align=1)

        if self.code == types.uint8:
            pairs = builder.zext(integers(builder.mul(block, index(LANES))), _INTEGERS)
        for half in (0, 1):
            if pairs is None:
                place = builder.add(builder.mul(block, index(BLOCK)), index(half * LANES))
                numbers = builder.sext(integers(place), _INTEGERS)
            elif half == 0:
                numbers = builder.and_(pairs, ir.Constant(_INTEGERS, [15] * LANES))
            else:
                numbers = builder.lshr(pairs, ir.Constant(_INTEGERS, [4] * LANES))
            group = builder.mul(block, index(self.groups_in_block))
            group = builder.add(group, index(half * (self.groups_in_block - 1)))
            scale, weights = broadcast(builder, builder.gep(scales, [group])), builder.sitofp(numbers, VECTOR)
            if self.shifted:
                yield multiply_add(builder, weights, scale, broadcast(builder, builder.gep(offsets, [group])))
            else:
                yield builder.fmul(weights, scale)
