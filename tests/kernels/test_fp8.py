"""Rounding to fp8: every backend against the formats' definition."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmsched.kernels import reference
from llmsched.kernels.cpu import ops
from llmsched.kernels.fp8 import FP8_TYPES, restored, stored

#: Exponent bits, mantissa bits, bias, and number of finite magnitudes of each type.
FORMATS = {torch.float8_e4m3fn: (4, 3, 7, 0x7F), torch.float8_e5m2: (5, 2, 15, 0x7C)}


def magnitudes(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    """Return the finite numbers that are not negative, in the order of their bits."""
    _, mantissa, bias, count = FORMATS[dtype]
    found = []
    for code in range(count):
        exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        found.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return np.array(found)


def nearest(numbers: npt.NDArray[np.float32], dtype: torch.dtype) -> npt.NDArray[np.uint8]:
    """Return the bits of the nearest finite number of each number, those with an even last bit at ties."""
    table = magnitudes(dtype)
    distances = np.abs(np.abs(numbers.astype(np.float64))[:, None] - table)
    distances[np.isinf(numbers)] = -table
    ties = distances == distances.min(axis=1, keepdims=True)
    codes = np.where(ties, np.arange(len(table)) % 2, 2).argmin(axis=1)
    codes[np.isnan(numbers)] = 0x7F
    return (codes | np.signbit(numbers) * 0x80).astype(np.uint8)


def hard_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of a type, the middles between them, their neighbours in float32, and numbers beyond the type."""
    table = magnitudes(dtype)
    middles = [(one + other) / 2 for one, other in pairwise(table)]
    exact = np.array([*table, *middles, *table[-1] * np.array([1.03, 1.0625, 1.1, 2, 1e9]), 1e-9], np.float32)
    every = [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0)), [np.inf, np.nan]]
    return torch.from_numpy(np.concatenate([*every, *(-np.asarray(part) for part in every)]).astype(np.float32))


@pytest.mark.parametrize("dtype", FP8_TYPES, ids=str)
def test_all_codes(dtype: torch.dtype) -> None:
    found = restored(torch.arange(256).to(torch.uint8).view(dtype)[:, None, None], torch.tensor([4.0])).flatten()
    table, count = torch.from_numpy(magnitudes(dtype)).float() * 4, FORMATS[dtype][3]
    torch.testing.assert_close(found[:count], table, rtol=0, atol=0)
    torch.testing.assert_close(found[128 : 128 + count], -table, rtol=0, atol=0)
    assert not found[count:128].isfinite().any()


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 16.0])
@pytest.mark.parametrize("dtype", FP8_TYPES, ids=str)
def test_the_nearest_number_is_stored(dtype: torch.dtype, scale: float) -> None:
    numbers = hard_numbers(dtype)
    found = stored((numbers * scale)[:, None, None], dtype, torch.tensor([scale])).view(torch.uint8).flatten()
    assert found.tolist() == nearest(numbers.numpy(), dtype).tolist()


@pytest.mark.parametrize("module", [reference, ops], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", FP8_TYPES, ids=str)
def test_every_way_to_write_stores_it(dtype: torch.dtype, module: ModuleType) -> None:
    """Keys of one KV head and values of another, through both ops that write."""
    numbers = hard_numbers(dtype)
    size = len(numbers)
    scales = torch.tensor([[0.125, 4.0], [2.0, 0.5]])
    wanted = nearest(numbers.numpy(), dtype)
    rows = torch.stack([numbers * scale for scale in scales.flatten()]).view(1, 4, size)
    for name in ("write_kv", "rotate_and_write"):
        caches = torch.zeros(2, 3, 2, 4, size, dtype=torch.uint8).view(dtype).unbind(0)
        slots = torch.tensor([6])
        if name == "write_kv":
            module.write_kv(rows[:, :2], rows[:, 2:], *caches, slots, kv_scales=scales)
        else:
            projected = torch.cat([rows[:, :2], rows], dim=1).flatten(1)
            module.rotate_and_write(projected, torch.empty(1, 0), torch.empty(1, 0), *caches, slots, kv_scales=scales)
        for cache in caches:
            found = cache.view(torch.uint8)
            assert [found[1, head, 2].tolist() for head in (0, 1)] == [wanted.tolist()] * 2, name
            assert int((found != 0).sum()) == 2 * int((wanted != 0).sum())
