"""Packed matrices: the CPU kernels against the reference, for every layout and number of rows."""

from __future__ import annotations

import pytest
import torch
from layers import normal
from torch import Tensor

from llmsched.kernels import reference
from llmsched.kernels.cpu import ops, packed_products
from llmsched.kernels.packed_matrix import PackedMatrix

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
#: Bits of a code, codes in a group, type of scales, presence of offsets: the layouts that GGUF's types have.
LAYOUTS = [(4, 32, FLOAT16, True), (4, 32, FLOAT32, True), (8, 32, FLOAT16, False), (8, 16, FLOAT32, False)]
LAYOUTS += [(8, 32, FLOAT16, True), (8, 32, FLOAT32, True)]
#: Fewer rows of the matrix than the kernel multiplies at a time, a whole number of chunks, and a tail.
SHAPES = [(7, 64), (16, 32), (50, 96), (130, 576)]
#: Every tile of the kernel alone, with a tail, and after another; and more rows than the kernel multiplies.
NUM_ROWS = (1, 2, 3, 4, 5, 8, 13, 65)


def random_matrix(shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype, shifted: bool) -> PackedMatrix:
    generator = torch.Generator().manual_seed(shape[0])
    codes = torch.randint(-128, 128, (shape[0], shape[1] * bits // 8), dtype=torch.int8, generator=generator)
    scales, offsets = (normal(shape[0], shape[1] // group, seed=seed).to(dtype) / 64 for seed in (1, 2))
    return PackedMatrix(codes if bits == 8 else codes.view(torch.uint8), scales, offsets if shifted else None)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_products_with_few_and_many_rows(layout: tuple[int, int, torch.dtype, bool]) -> None:
    for shape in SHAPES:
        matrix = random_matrix(shape, *layout)
        for count in NUM_ROWS:
            rows = normal(count, shape[1], seed=count)
            expected = rows.double() @ matrix.unpacked().double().T
            assert error(ops.linear(rows, (matrix,), None), expected) < 2e-6
            assert error(reference.linear(rows, (matrix,), None), expected) < 2e-6


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("count", [1, 5, 70])
def test_parts_of_different_layouts_with_a_bias(count: int, dtype: torch.dtype) -> None:
    """Queries and keys may have 4-bit codes and values 8-bit codes; all are columns of one result."""
    parts = tuple(random_matrix((rows, 96), *layout) for rows, layout in zip((64, 40), LAYOUTS[1:], strict=False))
    rows, bias = normal(count, 96, dtype=dtype), normal(104, seed=3, dtype=dtype)
    expected = reference.linear(rows.float(), parts, bias.float())
    found = ops.linear(rows, parts, bias)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert error(found, expected) < (2e-6 if dtype == FLOAT32 else 2 * torch.finfo(dtype).eps)


def test_a_matrix_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "TILE_NUMBERS", 64 * 24)
    matrix, rows = random_matrix((50, 64), *LAYOUTS[0]), normal(70, 64)
    assert error(ops.linear(rows, (matrix,), None), reference.linear(rows, (matrix,), None)) < 2e-6


def test_a_wrong_code_would_be_seen() -> None:
    matrix, rows = random_matrix((50, 64), *LAYOUTS[0]), normal(1, 64)
    other = matrix._replace(codes=matrix.codes ^ torch.eye(50, 32, dtype=torch.uint8))
    assert error(ops.linear(rows, (other,), None), reference.linear(rows, (matrix,), None)) > 1e-4
