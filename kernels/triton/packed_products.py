"""Products with packed matrices for CUDA. The kernel dequantises the matrix in registers."""
# The product is computed as its transpose, tile of the matrix x tile of the rows, so that the dequantised tile is the
# first factor, which a tensor core may read from registers. Weights are rounded to the type of the rows, as in a
# dequantised model, and sums are float32. If there are few rows, the product is limited by the memory that the matrix
# takes, and the matrix may have too few tiles for all processors of the GPU: then several programs share the columns of
# a tile, and `sum_kernel` adds their results. The first product with a kind of matrix compiles the kernels for all
# numbers of rows, so that none is compiled after a warm-up.

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmsched.kernels.packed_matrix import BLOCK, PackedMatrix
from llmsched.kernels.triton.tiling import Gpu

#: What a code stands for: an integer, an element of the matrix's table, or a float8_e4m3fn.
INTEGER, TABLE, FLOAT_8 = (tl.constexpr(number) for number in range(3))
#: Bytes of a row of 4-bit codes in one block.
HALF = tl.constexpr(BLOCK // 2)
#: Fewest steps through the columns that a program gets when several programs share them.
MIN_STEPS = 4
#: Programs for each processor that a product with few rows should have.
PROGRAMS_PER_PROCESSOR = 4
SUM_BLOCK = 1024


#: Largest numbers of rows for which the first and the second tiling serve.
ROW_LIMITS = (16, 64)

#: Kinds of products whose kernels are compiled.
_ready: set[tuple[object, ...]] = set()


class Tiling(NamedTuple):
    block_t: int  # rows
    block_m: int  # rows of the matrix
    block_b: int  # bytes of a row of the matrix
    shares: bool  # True if several programs may share the columns of a tile
    num_warps: int
    num_stages: int


def choose_tiling(num_rows: int, item_size: int) -> Tiling:
    """Choose the tile sizes for a product of `num_rows` rows whose numbers take `item_size` bytes."""
    shares = num_rows <= ROW_LIMITS[1]
    if num_rows <= ROW_LIMITS[0]:
        return Tiling(16, 64, 32, shares, num_warps=4, num_stages=4)
    if item_size == 4:  # full float32 products run on CUDA cores, and larger tiles would not fit into registers
        return Tiling(64, 32, 32, shares, num_warps=4, num_stages=2)
    if num_rows <= ROW_LIMITS[1]:
        return Tiling(64, 64, 32, shares, num_warps=4, num_stages=3)
    return Tiling(128, 128, 32, shares, num_warps=8, num_stages=3)


@triton.jit
def decoded(codes, table, CODING: tl.constexpr):
    """Convert codes to the numbers (float32) that they stand for."""
    if CODING == TABLE:
        return tl.load(table + codes.to(tl.int32))
    if CODING == FLOAT_8:  # exponent and mantissa move to where float32 has them; the exponent's bias differs
        bits = (codes.to(tl.int32) << 20) & -0x78100000
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return codes.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "first", "stride"])
def product_kernel(
    rows,  # [num_rows, size]
    codes,  # [num_outputs, size / PER_BYTE] int8 or uint8
    scales,  # [num_outputs, size / GROUP]
    offsets,  # [num_outputs, size / GROUP]; unused unless SHIFTED
    table,  # [16]; unused unless CODING is TABLE
    bias,  # [stride]; unused unless BIAS
    output,  # [programs that share a tile, num_rows, stride]
    num_rows,
    num_outputs,
    size,
    first,  # column of `output` for the matrix's first row
    stride,
    CODING: tl.constexpr,
    PER_BYTE: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Compute a tile of `reference.linear`, for some of the columns of the matrix."""
    outputs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    share = tl.program_id(2)
    real_outputs, real_tokens = outputs < num_outputs, tokens < num_rows
    row_bytes = size // PER_BYTE
    span = tl.cdiv(tl.cdiv(row_bytes, BLOCK_B), tl.num_programs(2)) * BLOCK_B
    # The bytes of a tile are [BLOCK_M, BLOCK_B / HALF, HALF]: codes of equal position in neighbouring bytes have the
    # same scale, because groups are multiples of HALF codes.
    places, lanes, numbers = tl.arange(0, BLOCK_B // HALF) * HALF, tl.arange(0, HALF), tl.arange(0, BLOCK_B)
    columns = numbers // HALF * (HALF * PER_BYTE) + numbers % HALF
    code_rows = codes + outputs.to(tl.int64)[:, None, None] * row_bytes + lanes[None, None, :]
    groups = outputs.to(tl.int64)[:, None] * (size // GROUP)
    token_rows = rows + tokens.to(tl.int64)[:, None] * size
    total = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
    for start in range(share * span, min((share + 1) * span, row_bytes), BLOCK_B):
        inside = real_outputs[:, None] & (start + places < row_bytes)[None, :]
        packed = tl.load(code_rows + (start + places)[None, :, None], mask=inside[:, :, None], other=0)
        for half in tl.static_range(PER_BYTE):
            part = packed
            if PER_BYTE == 2:
                part = packed >> 4 if half else packed & 15
            group = groups + (((start + places) * PER_BYTE + half * HALF) // GROUP)[None, :]
            scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
            weights = decoded(part, table, CODING) * scale[:, :, None]
            if SHIFTED:
                weights += tl.load(offsets + group, mask=inside, other=0.0).to(tl.float32)[:, :, None]
            column = start * PER_BYTE + half * HALF + columns
            x = tl.load(token_rows + column[None, :], mask=real_tokens[:, None] & (column < size)[None, :], other=0.0)
            weights = weights.to(x.dtype).reshape(BLOCK_M, BLOCK_B)
            total = tl.dot(weights, tl.trans(x), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + first + outputs, mask=real_outputs, other=0.0).to(tl.float32)[:, None]
    place = (share * num_rows + tokens).to(tl.int64)[None, :] * stride + first + outputs[:, None]
    tl.store(output + place, total.to(output.dtype.element_ty), mask=real_outputs[:, None] & real_tokens[None, :])


@triton.jit(do_not_specialize=["num_parts", "num_outputs", "first", "stride"])
def sum_kernel(
    parts,  # [num_parts, num_rows, num_outputs] float32
    bias,  # [stride]; unused unless BIAS
    output,  # [num_rows, stride]
    num_parts,
    num_outputs,
    first,  # column of `output` for the first number of `parts`
    stride,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums of the parts of one row, and the bias, to the output."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < num_outputs
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + (part * num_rows + row) * num_outputs + outputs, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + first + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * stride + first + outputs, total.to(output.dtype.element_ty), mask=inside)


def linear(rows: Tensor, parts: Sequence[PackedMatrix], bias: Tensor | None, gpu: Gpu) -> Tensor:
    """Compute `reference.linear` for a `weight` that consists of the packed matrices `parts`."""
    output = rows.new_empty(len(rows), sum(len(part.codes) for part in parts))
    first = 0
    if len(rows):
        for part in parts:
            _compile(rows, part, bias, output, gpu)
            inputs = rows.contiguous() if part.order is None else rows.index_select(1, part.order)
            _multiply(inputs, part, bias, output, first, gpu)
            first += len(part.codes)
    return output


def integer_codes(matrix: PackedMatrix) -> tuple[Tensor, int]:
    """Return the codes of a packed matrix as integers, and their kind: INTEGER, TABLE or FLOAT_8."""
    if matrix.codes.dtype == torch.float8_e4m3fn:
        return matrix.codes.view(torch.int8), FLOAT_8.value
    return matrix.codes, INTEGER.value if matrix.table is None else TABLE.value


def _compile(rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, output: Tensor, gpu: Gpu) -> None:
    """Compile the kernels for products of any number of rows with a matrix, if this is the first such matrix."""
    types = [None if part is None else part.dtype for part in (rows, bias, *matrix)]
    kind = (rows.device, matrix.shape, matrix.scales.shape[1], *types)
    if kind not in _ready:
        _ready.add(kind)
        for count in (1, *(limit + 1 for limit in ROW_LIMITS)):
            written = output.new_empty(count, output.shape[1])
            _multiply(rows.new_zeros(count, rows.shape[1]), matrix, bias, written, 0, gpu)


def _multiply(rows: Tensor, matrix: PackedMatrix, bias: Tensor | None, output: Tensor, first: int, gpu: Gpu) -> None:
    """Write rows @ matrix.T + bias to the columns of `output` from `first` on."""
    numbers, coding = integer_codes(matrix)
    _, scales, offsets, table, _ = matrix
    (num_outputs, size), num_rows = matrix.shape, len(rows)
    tiling = choose_tiling(num_rows, rows.element_size())
    num_parts = count_shares(tiling, num_outputs, numbers.shape[1], gpu)
    shared, stride = num_parts > 1, output.stride(0)
    written = rows.new_empty(num_parts, num_rows, num_outputs, dtype=torch.float32) if shared else output
    grid = (-(-num_outputs // tiling.block_m), -(-num_rows // tiling.block_t), num_parts)
    product_kernel[grid](
        rows,
        numbers,
        scales,
        scales if offsets is None else offsets,
        scales if table is None else table,
        rows if bias is None else bias,
        written,
        num_rows,
        num_outputs,
        size,
        0 if shared else first,
        num_outputs if shared else stride,
        CODING=coding,
        PER_BYTE=8 // matrix.bits,
        GROUP=size // scales.shape[1],
        SHIFTED=offsets is not None,
        BIAS=bias is not None and not shared,
        BLOCK_T=tiling.block_t,
        BLOCK_M=tiling.block_m,
        BLOCK_B=tiling.block_b,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    if shared:
        sum_kernel[(num_rows, -(-num_outputs // SUM_BLOCK))](
            written,
            rows if bias is None else bias,
            output,
            num_parts,
            num_outputs,
            first,
            stride,
            BIAS=bias is not None,
            BLOCK=SUM_BLOCK,
            enable_fp_fusion=True,
        )


def count_shares(tiling: Tiling, num_outputs: int, row_bytes: int, gpu: Gpu) -> int:
    """Return how many programs share the columns of a tile of a matrix."""
    if not tiling.shares:
        return 1
    programs = -(-num_outputs // tiling.block_m)
    wanted = -(-PROGRAMS_PER_PROCESSOR * gpu.num_processors // programs)
    return max(1, min(wanted, row_bytes // (MIN_STEPS * tiling.block_b)))
