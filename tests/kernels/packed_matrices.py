"""Random packed matrices of all kinds, and their products compared with the product of the unpacked matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from layers import normal
from torch import Tensor

from llmsched.kernels.packed_matrix import PackedMatrix

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


class Kind(NamedTuple):
    code: str  # "int4", "table", "int8" or "fp8"
    group: int  # codes that share a scale; 0 for a whole row
    scales: torch.dtype = FLOAT16
    offsets: torch.dtype | None = None
    ordered: bool = False


#: First the kinds of GGUF's types, then those of other formats.
KINDS = (
    Kind("int4", 32, FLOAT16, FLOAT16),
    Kind("int4", 32, FLOAT32, FLOAT32),
    Kind("int8", 32),
    Kind("int8", 16, FLOAT32),
    Kind("int8", 32, FLOAT16, FLOAT16),
    Kind("int8", 32, FLOAT32, FLOAT32),
    Kind("int4", 64, FLOAT16, FLOAT32),
    Kind("int4", 0, BFLOAT16, BFLOAT16, ordered=True),
    Kind("int4", 48),
    Kind("table", 16, FLOAT32),
    Kind("table", 64, BFLOAT16, FLOAT32),
    Kind("int8", 0, FLOAT32),
    Kind("int8", 96, BFLOAT16, ordered=True),
    Kind("fp8", 0, FLOAT32),
    Kind("fp8", 64, BFLOAT16, FLOAT32, ordered=True),
    Kind("fp8", 48, FLOAT16),
)


def random_matrix(kind: Kind, rows: int, size: int) -> PackedMatrix:
    """Return a matrix [rows, size]. `size` must be a multiple of the kind's group."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, size), dtype=torch.uint8, generator=generator, device="cpu")
    if kind.code in ("int4", "table"):
        codes = codes[:, : size // 2].contiguous()
    elif kind.code == "fp8":
        codes[codes & 127 == 127] = 5  # not a number
        codes = codes.view(torch.float8_e4m3fn)
    else:
        codes = codes.view(torch.int8)
    groups = size // (kind.group or size)
    spread = {"int4": 8, "table": 1, "int8": 64, "fp8": 128}[kind.code]
    matrix = PackedMatrix(
        codes,
        (normal(rows, groups, seed=1) / spread).to(kind.scales),
        None if kind.offsets is None else normal(rows, groups, seed=2).to(kind.offsets),
        normal(16, seed=3) if kind.code == "table" else None,
        torch.randperm(size, generator=generator, device="cpu") if kind.ordered else None,
    )
    return PackedMatrix._make(None if part is None else part.to(torch.get_default_device()) for part in matrix)


def fitting(kind: Kind, size: int) -> int:
    """Return the smallest multiple of 32 and of the kind's group that is at least `size`."""
    step = 96 if kind.group in (48, 96) else max(32, kind.group)
    return -(-size // step) * step


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def product_error(
    ops: Any, kind: Kind, rows: int, shape: tuple[int, int], dtype: torch.dtype, *, bias: bool = False
) -> float:
    """Return the relative error of a backend's product with a random matrix of about `shape`."""
    matrix = random_matrix(kind, shape[0], fitting(kind, shape[1]))
    inputs = normal(rows, matrix.shape[1], dtype=dtype, seed=rows)
    added = normal(shape[0], dtype=dtype, seed=9) if bias else None
    expected = inputs.double() @ matrix.unpacked().to(dtype).double().T
    expected = expected if added is None else expected + added.double()
    found = ops.linear(inputs, (matrix,), added)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    return relative_error(found, expected)
