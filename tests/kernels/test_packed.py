"""Packed matrices: their numbers, and the products of the CPU kernels, for every kind and number of rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
import torch
from layers import normal
from numba import types
from numba.extending import intrinsic
from packed_matrices import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    KINDS,
    Kind,
    fitting,
    product_error,
    random_matrix,
    relative_error,
)

from llmsched.kernels import reference
from llmsched.kernels.cpu import ops, packed_products, packed_vectors
from llmsched.kernels.packed_matrix import BLOCK, PackedMatrix

#: Fewer rows of the matrix than the kernel multiplies at a time, a whole number of chunks, and a tail.
SHAPES = [(7, 64), (16, 32), (50, 96), (130, 576)]
#: Every tile of the kernel alone, with a tail, and after another; and more rows than the kernel multiplies.
NUM_ROWS = (1, 2, 3, 4, 5, 8, 13, 65)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_unpacked_numbers_follow_from_the_definition(kind: Kind) -> None:
    """Each number is computed alone from the code that the layout puts in its place."""
    matrix = random_matrix(kind, 5, fitting(kind, 64))
    rows, size = matrix.shape
    found, group = matrix.unpacked(), size // matrix.scales.shape[1]
    for row in range(rows):
        for column in range(size):
            if kind.code in ("int4", "table"):
                block, place = divmod(column, BLOCK)
                pair = int(matrix.codes[row, block * 16 + place % 16])
                code = pair >> 4 if place >= 16 else pair & 15
                number = code if matrix.table is None else float(matrix.table[code])
            else:
                number = float(matrix.codes[row, column])
            number = np.float32(number) * np.float32(float(matrix.scales[row, column // group]))
            if matrix.offsets is not None:
                number += np.float32(float(matrix.offsets[row, column // group]))
            place = column if matrix.order is None else int(matrix.order[column])
            assert float(found[row, place]) == pytest.approx(float(number), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_with_few_and_many_rows(kind: Kind) -> None:
    for shape in SHAPES:
        for count in NUM_ROWS:
            assert product_error(ops, kind, count, shape, FLOAT32) < 2e-6
        assert product_error(reference, kind, 3, shape, FLOAT32, bias=True) < 2e-6


@pytest.mark.parametrize(("kind", "pairs"), [(KINDS[0], True), (KINDS[6], True), (KINDS[7], True), (KINDS[0], False)])
def test_only_results_of_bfloat16_rows_are_rounded(kind: Kind, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs without an instruction for pairs of bfloat16 numbers compute in float32."""
    if pairs and not packed_products.MULTIPLIES_BF16:
        pytest.skip("this CPU lacks the instruction")
    monkeypatch.setattr(packed_products, "MULTIPLIES_BF16", pairs)
    monkeypatch.setattr(packed_products, "bodies", packed_products.bodies.__wrapped__)
    monkeypatch.setattr(packed_products, "product_body", cache(packed_products.product_body.__wrapped__))
    for shape in SHAPES[1:]:
        matrix = random_matrix(kind, shape[0], fitting(kind, shape[1]))
        for count in NUM_ROWS[:-1]:
            rows = normal(count, matrix.shape[1], dtype=BFLOAT16, seed=count)
            expected = rows.double() @ matrix.unpacked().double().T
            found = ops.linear(rows, (matrix,), None).double()
            allowed = expected.abs() * torch.finfo(BFLOAT16).eps / 2 + 2e-6 * expected.abs().max()
            assert ((found - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("count", [1, 5, 70])
def test_parts_of_different_kinds_with_a_bias(count: int, dtype: torch.dtype) -> None:
    """Queries and keys may have 4-bit codes and values 8-bit codes; all are columns of one result."""
    parts = tuple(random_matrix(KINDS[number], rows, 96) for number, rows in ((1, 64), (2, 40), (12, 24)))
    rows, bias = normal(count, 96, dtype=dtype), normal(128, seed=3, dtype=dtype)
    expected = reference.linear(rows.float(), parts, bias.float())
    found = ops.linear(rows, parts, bias)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert relative_error(found, expected) < (2e-6 if dtype == FLOAT32 else 2 * torch.finfo(dtype).eps)


def test_a_matrix_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "TILE_NUMBERS", 64 * 24)
    assert product_error(ops, KINDS[0], 70, (50, 64), FLOAT32) < 2e-6


@pytest.mark.parametrize("permutes", [True, False])
def test_numbers_of_a_table(permutes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs without an instruction that selects numbers in registers load each number."""
    if permutes and not packed_vectors.HAS_PERMUTATION:
        pytest.skip("this CPU lacks the instruction")
    monkeypatch.setattr(packed_vectors, "HAS_PERMUTATION", permutes)

    @intrinsic
    def look_up(typing_context: Any, table: Any, codes: Any, found: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> None:
            numbers, places, target = (
                context.make_array(kind)(context, builder, array).data
                for kind, array in zip(signature.args, args, strict=True)
            )
            layout = packed_vectors.Layout(packed_vectors.TABLE_4, False, 1)
            integers = builder.load(builder.bitcast(places, packed_vectors.INTEGERS.as_pointer()), align=4)
            chosen = packed_vectors.look_up(builder, layout.load_table(builder, numbers), integers)
            builder.store(chosen, builder.bitcast(target, chosen.type.as_pointer()), align=4)

        return types.void(table, codes, found), codegen

    @numba.njit
    def call(table: Any, codes: Any, found: Any) -> None:
        look_up(table, codes, found)

    table, found = np.random.default_rng(0).normal(size=16).astype(np.float32), np.zeros(16, np.float32)
    codes = np.random.default_rng(1).permutation(16).astype(np.int32)
    call(table, codes, found)
    np.testing.assert_array_equal(found, table[codes])


def test_all_codes_of_fp8_but_nan() -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127] + [0, 0], dtype=torch.uint8)
    matrix = PackedMatrix(codes.view(torch.float8_e4m3fn).repeat(16, 1), torch.ones(16, 1))
    found = ops.linear(torch.eye(256), (matrix,), None)  # unpacked to memory
    few = torch.cat([ops.linear(part, (matrix,), None) for part in torch.eye(256).split(8)])
    assert torch.equal(found[:, 0], matrix.codes[0].float())
    assert torch.equal(few[:, 0], matrix.codes[0].float())


def test_rows_of_a_matrix_keep_its_table_and_order() -> None:
    for kind in (KINDS[9], KINDS[12], KINDS[14]):
        matrix = random_matrix(kind, 12, fitting(kind, 96))
        index = torch.tensor([3, 3, 11])
        assert torch.equal(matrix.rows(index).unpacked(), matrix.unpacked()[index])


def test_a_wrong_code_would_be_seen() -> None:
    matrix, rows = random_matrix(KINDS[0], 50, 64), normal(1, 64)
    other = matrix._replace(codes=matrix.codes ^ torch.eye(50, 32, dtype=torch.uint8))
    assert relative_error(ops.linear(rows, (other,), None), reference.linear(rows, (matrix,), None)) > 1e-4
