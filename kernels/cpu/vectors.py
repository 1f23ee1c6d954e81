"""Inner loops of attention in LLVM's vector types, for heads whose size is a multiple of 64."""
# LLVM also vectorises these loops if they are written in Python, but with a horizontal sum for each product of two
# vectors, with loads and stores of the output for every few values, and with checks that arrays do not overlap. Here
# the horizontal sums for KEYS keys are computed together, and outputs stay in registers. Attention takes 0.65 times as
# long if the KV is in the CPU's caches, and 0.87 times as long if it comes from memory (measured).

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llmsched.kernels.cpu.compiled import FP8, Fp8

KEYS = 8  # keys whose products with a query are computed together
LANES = 16
WIDTH = 64  # numbers of an output that stay in registers

FLOAT, VECTOR = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES)
WORDS = ir.VectorType(ir.IntType(32), LANES)
_FLAGS = ("contract",)  # a product and a sum may become one instruction
#: Instruction that adds products of two vectors of bfloat16 to float32. The vectors hold two numbers in 32 bits.
_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
#: True if the CPU has this instruction.
MULTIPLIES_BF16 = bool(llvm.get_host_cpu_features().get("avx512bf16"))


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing_context: Any, source: Any, row: Any, target: Any, target_row: Any) -> Any:
    """Convert source[row] (float32, or the bits of bfloat16 or fp8) to float32, and write it to target[target_row]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, row, target, target_row = args
        element = signature.args[0].dtype
        dim = columns(context, builder, signature.args[2], target)
        read = address(context, builder, signature.args[0], source, row)
        written = address(context, builder, signature.args[2], target, target_row)
        kind = ir.VectorType(read.type.pointee, LANES).as_pointer()
        with cgutils.for_range_slice(builder, dim.type(0), dim, dim.type(LANES), dim.type) as (d, _):
            numbers = builder.load(builder.bitcast(builder.gep(read, [d]), kind), align=1 if element in FP8 else 2)
            if element in FP8:
                numbers = widen_fp8(builder, numbers, FP8[element])
            elif element == types.uint16:
                numbers = builder.bitcast(builder.shl(builder.zext(numbers, WORDS), words(16)), VECTOR)
            builder.store(numbers, builder.bitcast(builder.gep(written, [d]), VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def score_keys(typing_context: Any, query: Any, head: Any, keys: Any, key: Any, scores: Any, place: Any) -> Any:
    """Set scores[head, place + i] to query[head] . keys[key + i], for i from 0 to KEYS - 1.

    All arrays are contiguous float32 matrices.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return write_scores(context, builder, signature, args, VECTOR, partial(multiply_add, builder))

    return types.void(query, types.intp, keys, types.intp, scores, types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def score_bf16_keys(typing_context: Any, query: Any, head: Any, keys: Any, key: Any, scores: Any, place: Any) -> Any:
    """Do the same as `score_keys` for `query` and `keys` of bfloat16 (as uint16). The CPU must have MULTIPLIES_BF16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dot = bf16_dot(builder)
        return write_scores(context, builder, signature, args, WORDS, lambda one, other, total: dot(total, one, other))

    return types.void(query, types.intp, keys, types.intp, scores, types.intp), codegen


def write_scores(context: Any, builder: Any, signature: Any, args: Any, vector: Any, add: Callable[..., Any]) -> Any:
    """Generate the code of `score_keys`. `add(query, key, total)` adds products of numbers read as `vector`."""
    query, head, keys, key, scores, place = args
    dim = columns(context, builder, signature.args[0], query)
    query_row = address(context, builder, signature.args[0], query, head)
    rows = [
        address(context, builder, signature.args[2], keys, builder.add(key, key.type(number))) for number in range(KEYS)
    ]
    sums = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, None)) for _ in range(KEYS)]
    number_bits = signature.args[0].dtype.bitwidth
    step = dim.type(32 // number_bits * LANES)
    with cgutils.for_range_slice(builder, dim.type(0), dim, step, dim.type) as (d, _):
        x = load(builder, query_row, d, vector, number_bits // 8)
        for row, total in zip(rows, sums, strict=True):
            y = load(builder, row, d, vector, number_bits // 8)
            builder.store(add(x, y, builder.load(total)), total)
    target = address(context, builder, signature.args[4], scores, head, place)
    found = sum_each(builder, [builder.load(total) for total in sums])
    builder.store(found, builder.bitcast(target, found.type.as_pointer()), align=4)
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def add_values(typing_context: Any, weights: Any, head: Any, place: Any, values: Any, count: Any, output: Any) -> Any:
    """Add weights[head, place + i] * values[i] to output[head], for i from 0 to count - 1.

    All arrays are contiguous float32 matrices.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights, head, place, values, count, output = args
        dim = columns(context, builder, signature.args[5], output)
        weight_row = address(context, builder, signature.args[0], weights, head, place)
        output_row = address(context, builder, signature.args[5], output, head)
        value_rows = address(context, builder, signature.args[3], values, count.type(0))
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(WIDTH // LANES)]
        with cgutils.for_range_slice(builder, dim.type(0), dim, dim.type(WIDTH), dim.type) as (d, _):
            places = [builder.add(d, d.type(LANES * number)) for number in range(len(sums))]
            for column, total in zip(places, sums, strict=True):
                builder.store(load(builder, output_row, column), total)
            with cgutils.for_range(builder, count) as loop:
                spread = broadcast(builder, builder.gep(weight_row, [loop.index]))
                row = builder.mul(loop.index, dim)
                for column, total in zip(places, sums, strict=True):
                    value = load(builder, value_rows, builder.add(row, column))
                    builder.store(multiply_add(builder, spread, value, builder.load(total)), total)
            for column, total in zip(places, sums, strict=True):
                target = builder.bitcast(builder.gep(output_row, [column]), VECTOR.as_pointer())
                builder.store(builder.load(total), target, align=4)
        return context.get_dummy_value()

    return types.void(weights, types.intp, types.intp, values, types.intp, output), codegen


def widen_fp8(builder: Any, codes: Any, format: Fp8) -> Any:
    """Convert a vector of fp8 numbers, as bytes, to float32, as `compiled.from_fp8` does."""
    bits = builder.zext(codes, WORDS)
    size = builder.and_(bits, words(0x7F))
    moved = builder.shl(size, words(23 - format.mantissa))
    factor = ir.Constant(VECTOR, [ir.Constant(FLOAT, 2.0 ** (127 - format.bias))] * LANES)
    finite = builder.bitcast(builder.fmul(builder.bitcast(moved, VECTOR), factor), WORDS)
    is_special = builder.icmp_unsigned(">=", size, words(format.special))
    magnitude = builder.select(is_special, builder.or_(moved, words(0x7F800000)), finite)
    sign = builder.shl(builder.and_(bits, words(0x80)), words(24))
    return builder.bitcast(builder.or_(magnitude, sign), VECTOR)


def bf16_dot(builder: Any) -> Callable[[Any, Any, Any], Any]:
    """Return a function that adds the products of two vectors of bfloat16, as WORDS, to a vector of float32."""
    function = ir.FunctionType(VECTOR, [VECTOR, WORDS, WORDS])
    dot = cgutils.get_or_insert_function(builder.module, function, _DOT)
    return lambda total, one, other: builder.call(dot, [total, one, other])


def words(number: int) -> Any:
    return ir.Constant(WORDS, [number] * LANES)


def columns(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    shape = context.make_array(array_type)(context, builder, array).shape
    return builder.extract_value(shape, 1)


def address(context: Any, builder: Any, array_type: Any, array: Any, row: Any, column: Any = None) -> Any:
    """Return a pointer to an element of a contiguous matrix, by default to the first element of the row."""
    offset = builder.mul(row, columns(context, builder, array_type, array))
    offset = offset if column is None else builder.add(offset, column)
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])


def load(builder: Any, row: Any, place: Any, vector: Any = VECTOR, align: int = 4) -> Any:
    return builder.load(builder.bitcast(builder.gep(row, [place]), vector.as_pointer()), align=align)


def broadcast(builder: Any, pointer: Any) -> Any:
    """Return a vector that repeats the float at `pointer`."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), builder.load(pointer), ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, mask([0] * LANES))


def multiply_add(builder: Any, one: Any, other: Any, total: Any) -> Any:
    return builder.fadd(builder.fmul(one, other, flags=_FLAGS), total, flags=_FLAGS)


def sum_pairs(builder: Any, one: Any, other: Any, count: int = LANES) -> Any:
    """Return the sum of each pair of neighbours: first the pairs in `one`, then the pairs in `other`."""
    even = builder.shuffle_vector(one, other, mask(range(0, 2 * count, 2)))
    odd = builder.shuffle_vector(one, other, mask(range(1, 2 * count, 2)))
    return builder.fadd(even, odd)


def sum_each(builder: Any, vectors: Sequence[Any]) -> Any:
    """Return a vector with the sum of each of the `vectors`, whose number is a power of two up to LANES."""
    lanes, count = LANES, len(vectors)
    while len(vectors) > 1:
        vectors = [sum_pairs(builder, *pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    found = vectors[0]
    while lanes > count:
        lanes //= 2
        found = sum_pairs(builder, found, found, lanes)
    return found


def mask(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), list(numbers))
