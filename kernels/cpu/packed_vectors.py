"""Inner loops of products with packed matrices, in LLVM's vector types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmsched.kernels.cpu.vectors import (
    LANES,
    VECTOR,
    address,
    broadcast,
    columns,
    load,
    mask,
    multiply_add,
    sum_each,
)
from llmsched.kernels.packed_matrix import BLOCK

#: What a code stands for: a 4-bit or 8-bit integer, an element of the matrix's table, or a float8_e4m3fn.
INTEGER_4, TABLE_4, INTEGER_8, FLOAT_8 = range(4)

_BYTES, INTEGERS = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(32), LANES)
_HALF = ir.VectorType(ir.FloatType(), LANES // 2)
#: True if the CPU has an instruction that selects 8 of 8 numbers in registers.
HAS_PERMUTATION = llvm.get_host_cpu_features().get("avx2", False)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def multiply_tile(
    typing_context: Any,
    codes: Any,
    first: Any,
    scales: Any,
    offsets: Any,
    start: Any,
    shift: Any,
    table: Any,
    rows: Any,
    number: Any,
    sums: Any,
    count: Any,
    num_columns: Any,
    coding: Any,
    shifted: Any,
    groups_in_block: Any,
) -> Any:
    """Multiply `count` of `rows`, from `number` on, by `num_columns` rows of the matrix `codes`, from `first` on.

    `sums` gets the products with row `first` of the matrix, then those with the next row, and so on. Rows `start`,
    `start` + 1, ... of `scales` and `offsets` (float32) are those of the matrix's rows `first`, `first` + 1, ...
    2^`shift` blocks share a scale.
    """
    how_many, how_many_columns = count.literal_value, num_columns.literal_value
    layout = Layout(coding.literal_value, bool(shifted.literal_value), groups_in_block.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, first, scales, offsets, start, shift, table, rows, number, sums, *_ = args
        kinds = signature.args
        size = columns(context, builder, kinds[7], rows)
        index = size.type
        inputs = row_addresses(context, builder, kinds[7], rows, number, how_many)
        numbers = layout.load_table(builder, context.make_array(kinds[6])(context, builder, table).data)
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
                for half, weights in enumerate(layout.weights(builder, loop.index, shift, *pointers, numbers)):
                    for x, total in zip(xs, totals[column * how_many :], strict=False):
                        builder.store(multiply_add(builder, weights, x[half], builder.load(total)), total)
        store_sums(context, builder, kinds[9], sums, totals)
        return context.get_dummy_value()

    numbers = (codes, types.intp, scales, offsets, types.intp, types.intp, table, rows, types.intp, sums)
    return types.void(*numbers, count, num_columns, coding, shifted, groups_in_block), codegen


def row_addresses(context: Any, builder: Any, kind: Any, rows: Any, number: Any, count: int) -> list[Any]:
    """Return the addresses of `count` rows of an array, from `number` on.

    The last row is repeated in place of missing rows.
    """
    size = columns(context, builder, kind, rows)
    num_rows = builder.sdiv(context.make_array(kind)(context, builder, rows).nitems, size)
    last = builder.sub(num_rows, size.type(1))
    found = []
    for each in range(count):
        row = builder.add(number, size.type(each))
        row = builder.select(builder.icmp_signed("<", row, last), row, last)
        found.append(address(context, builder, kind, rows, row))
    return found


def store_sums(context: Any, builder: Any, kind: Any, sums: Any, totals: Sequence[Any]) -> None:
    """Add up the lanes of each of the vectors at `totals`, and store the results in the array `sums`."""
    found = sum_each(builder, [builder.load(total) for total in totals])
    target = context.make_array(kind)(context, builder, sums).data
    builder.store(found, builder.bitcast(target, found.type.as_pointer()), align=4)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def unpack_row(
    typing_context: Any,
    codes: Any,
    row: Any,
    scales: Any,
    offsets: Any,
    shift: Any,
    table: Any,
    target: Any,
    coding: Any,
    shifted: Any,
    groups_in_block: Any,
) -> Any:
    """Dequantise row `row` of the packed matrix `codes` to `target` [1, N], float32.

    `scales` and `offsets` are those of this row, float32 [1, groups]. 2^`shift` blocks share a scale.
    """
    layout = Layout(coding.literal_value, bool(shifted.literal_value), groups_in_block.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes, row, scales, offsets, shift, table, target, *_ = args
        kinds = signature.args
        size = columns(context, builder, kinds[6], target)
        index = size.type
        scale, offset, entries, written = (
            context.make_array(kind)(context, builder, array).data
            for kind, array in zip((*kinds[2:4], *kinds[5:7]), (scales, offsets, table, target), strict=True)
        )
        numbers = layout.load_table(builder, entries)
        code = address(context, builder, kinds[0], codes, row)
        with cgutils.for_range(builder, builder.sdiv(size, index(BLOCK))) as loop:
            for half, weights in enumerate(layout.weights(builder, loop.index, shift, code, scale, offset, numbers)):
                place = builder.add(builder.mul(loop.index, index(BLOCK)), index(half * LANES))
                pointer = builder.bitcast(builder.gep(written, [place]), VECTOR.as_pointer())
                builder.store(weights, pointer, align=4)
        return context.get_dummy_value()

    return types.void(
        codes, types.intp, scales, offsets, types.intp, table, target, coding, shifted, groups_in_block
    ), codegen


class Layout(NamedTuple):
    """Layout of the codes in a packed matrix."""

    coding: int
    shifted: bool
    groups_in_block: int

    def weights(
        self, builder: Any, block: Any, shift: Any, codes: Any, scales: Any, offsets: Any, table: Any
    ) -> Iterator[Any]:
        """Yield the weights in block number `block` of a matrix row, as two vectors.

        `codes`, `scales` and `offsets` point to the data of this row. 2^shift blocks share a scale. `table` comes from
        `load_table`.
        """
        index, pairs = block.type, None

        def integers(place: Any, widen: Any) -> Any:
            found = builder.load(builder.bitcast(builder.gep(codes, [place]), _BYTES.as_pointer()), align=1)
            return widen(found, INTEGERS)

        if self.coding in (INTEGER_4, TABLE_4):
            pairs = integers(builder.mul(block, index(LANES)), builder.zext)
        for half in (0, 1):
            if pairs is None:
                numbers = integers(builder.add(builder.mul(block, index(BLOCK)), index(half * LANES)), builder.sext)
            elif half == 0:
                numbers = builder.and_(pairs, constant(15))
            else:
                numbers = builder.lshr(pairs, constant(4))
            group = builder.mul(builder.lshr(block, shift), index(self.groups_in_block))
            group = builder.add(group, index(half * (self.groups_in_block - 1)))
            scale, weights = broadcast(builder, builder.gep(scales, [group])), self._decoded(builder, numbers, table)
            if self.shifted:
                yield multiply_add(builder, weights, scale, broadcast(builder, builder.gep(offsets, [group])))
            else:
                yield builder.fmul(weights, scale)

    def _decoded(self, builder: Any, codes: Any, table: Any) -> Any:
        """Convert codes (int32) to the numbers (float32) that they stand for."""
        if self.coding == TABLE_4:
            return look_up(builder, table, codes)
        if self.coding == FLOAT_8:  # exponent and mantissa move to where float32 has them; the exponent's bias differs
            bits = builder.and_(builder.shl(codes, constant(20)), constant(0x87F00000))
            return builder.fmul(builder.bitcast(bits, VECTOR), ir.Constant(VECTOR, [2.0**120] * LANES))
        return builder.sitofp(codes, VECTOR)

    def load_table(self, builder: Any, table: Any) -> Any:
        """Return the argument `table` of `look_up` for the 16 numbers at `table`, or None for codes without a table."""
        if self.coding != TABLE_4:
            return None
        if not HAS_PERMUTATION:
            return table
        pointer = builder.bitcast(table, _HALF.as_pointer())
        return [builder.load(builder.gep(pointer, [ir.IntType(32)(half)]), align=4) for half in (0, 1)]


def look_up(builder: Any, table: Any, codes: Any) -> Any:
    """Return the numbers that codes from 0 to 15 (int32) select in a table, which comes from `Layout.load_table`."""
    if not HAS_PERMUTATION:
        found = ir.Constant(VECTOR, ir.Undefined)
        for lane in map(ir.IntType(32), range(LANES)):
            number = builder.load(builder.gep(table, [builder.extract_element(codes, lane)]))
            found = builder.insert_element(found, number, lane)
        return found
    integers = ir.VectorType(ir.IntType(32), LANES // 2)
    permute = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_HALF, [_HALF, integers]), "llvm.x86.avx2.permps"
    )
    halves = []
    for start in (0, LANES // 2):
        part = builder.shuffle_vector(codes, codes, mask(range(start, start + LANES // 2)))
        low, high = (builder.call(permute, [numbers, part]) for numbers in table)
        is_low = builder.icmp_unsigned("<", part, ir.Constant(integers, [8] * (LANES // 2)))
        halves.append(builder.select(is_low, low, high))
    return builder.shuffle_vector(*halves, mask(range(LANES)))


def constant(number: int) -> Any:
    return ir.Constant(INTEGERS, [number] * LANES)
