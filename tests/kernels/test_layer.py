"""Ops between a layer's matrix products: the reference against plain torch, the CPU kernels against the reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from layers import NORM_CASES, ROTARY_CASES, gate_difference, norm_difference, normal, rotary_difference
from transformers.activations import ACT2FN
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from llmsched.kernels import reference
from llmsched.kernels.cpu import ops
from llmsched.kernels.fp8 import FP8_TYPES

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
#: Tokens that one thread computes alone, and tokens for all threads.
TOKENS = (1, 3, 300)


def tolerance(dtype: torch.dtype, largest: float = 8.0) -> float:
    """Return the largest difference allowed: 1e-5 in float32, one unit of `largest` in half types."""
    return 1e-5 if dtype == FLOAT32 else largest * torch.finfo(dtype).eps


def test_reference_norm_is_torchs() -> None:
    rows, weight = normal(5, 24), normal(24, seed=1)
    expected = F.rms_norm(rows, (24,), weight + 1, 1e-5)
    torch.testing.assert_close(reference.norm(rows, weight, eps=1e-5, offset=1.0), expected)
    bias = normal(24, seed=2)
    expected = F.layer_norm(rows, (24,), weight, bias, 1e-5)
    torch.testing.assert_close(reference.norm(rows, weight, bias, eps=1e-5, centred=True), expected)


def test_reference_rotation_is_that_of_transformers() -> None:
    vectors, angles = normal(5, 3, 16), normal(5, 8, seed=1).repeat(1, 2)
    packed = vectors.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(packed, packed, angles.cos()[None], angles.sin()[None])
    found = reference.rotate(vectors, angles.cos(), angles.sin())
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


def test_reference_rotation_of_neighbours_is_that_of_transformers() -> None:
    vectors, angles = normal(5, 3, 16), normal(5, 4, seed=1)
    packed, halves = vectors.transpose(0, 1)[None], angles.repeat(1, 2)
    expected, _ = glm4.apply_rotary_pos_emb(packed, packed, halves.cos()[None], halves.sin()[None])
    tables = angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1)
    torch.testing.assert_close(reference.rotate(vectors, *tables, True), expected[0].transpose(0, 1))


def test_reference_reads_rows_by_group() -> None:
    """Rows with each KV head's queries, key and value together give the same as rows with all queries first."""
    vectors = normal(3, 2, 5, 4)  # two KV heads with three queries each
    tables = normal(3, 2, seed=1), normal(3, 2, seed=2)
    sorted_rows = torch.cat([vectors[:, :, :3].flatten(1, 2), vectors[:, :, 3], vectors[:, :, 4]], 1)
    found = []
    for rows, by_group in ((vectors, True), (sorted_rows, False)):
        caches = torch.zeros(2, 1, 2, 4, 4).unbind(0)
        query = reference.rotate_and_write(rows.flatten(1), *tables, *caches, torch.arange(3), by_group=by_group)
        found.append([query, *caches])
    torch.testing.assert_close(*found)
    torch.testing.assert_close(found[0][0][..., 2:], vectors[:, :, :3].flatten(1, 2)[..., 2:])


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_reference_gate_is_torchs(activation: reference.Activation) -> None:
    gate, up = normal(5, 12), normal(5, 12, seed=1)
    function = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": torch.nn.GELU("tanh")}.get(activation, ACT2FN["relu2"])
    torch.testing.assert_close(reference.gated(torch.cat([gate, up], 1), activation), function(gate) * up)
    torch.testing.assert_close(reference.activated(gate, activation), function(gate))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("case", NORM_CASES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_norm(dtype: torch.dtype, case: str, tokens: int) -> None:
    assert norm_difference(ops, reference, case, tokens, 70, dtype) <= tolerance(dtype)


@pytest.mark.parametrize("case", ROTARY_CASES)
@pytest.mark.parametrize(
    ("dtype", "cached"),
    [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT16, BFLOAT16)],
    ids=str,
)
@pytest.mark.parametrize("tokens", TOKENS)
def test_rotation(dtype: torch.dtype, cached: torch.dtype, case: str, tokens: int) -> None:
    coarser = max(dtype, cached, key=lambda each: torch.finfo(each).eps)
    assert rotary_difference(ops, reference, case, tokens, dtype, cached) <= tolerance(coarser)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gate(dtype: torch.dtype, activation: reference.Activation, tokens: int) -> None:
    assert gate_difference(ops, reference, tokens, 70, dtype, activation) <= tolerance(dtype, 1)


def test_bfloat16_is_rounded_to_the_nearest_and_nan_stays() -> None:
    """Sums of two bfloat16 numbers, for which float32 is exact, are rounded like torch rounds them."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BFLOAT16)
    residual, branch = numbers.clone().view(1, -1), numbers.roll(12345).view(1, -1)
    expected = residual + branch
    ops.add_norm(residual, branch, torch.ones(numbers.numel(), dtype=BFLOAT16), eps=1e-5)
    torch.testing.assert_close(residual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 5), (7, 70), (130, 576)])
def test_product_of_one_row(shape: tuple[int, int], with_bias: bool) -> None:
    weight, row = normal(*shape, dtype=BFLOAT16), normal(1, shape[1], seed=1, dtype=BFLOAT16)
    bias = normal(shape[0], seed=2, dtype=BFLOAT16) if with_bias else None
    expected = reference.linear(row.float(), weight.float(), None if bias is None else bias.float())
    found = ops.linear(row, weight, bias)
    assert found.dtype == BFLOAT16
    torch.testing.assert_close(found.float(), expected, rtol=torch.finfo(BFLOAT16).eps, atol=1e-4)


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    rows, weight = normal(300, 70, dtype=BFLOAT16), normal(70, seed=1, dtype=BFLOAT16)
    together = ops.add_norm(rows.clone(), None, weight, eps=1e-5)
    alone = ops.add_norm(rows[7:8].clone(), None, weight, eps=1e-5)
    torch.testing.assert_close(together[7:8], alone, rtol=0, atol=0)


@pytest.mark.parametrize("fp8", FP8_TYPES, ids=str)
@pytest.mark.parametrize("case", ROTARY_CASES)
def test_rotation_into_fp8(fp8: torch.dtype, case: str) -> None:
    """Rotated keys that differ by float32's rounding rarely round to different numbers, and then to neighbours."""
    for dtype in (FLOAT32, BFLOAT16):
        assert rotary_difference(ops, reference, case, 300, dtype, fp8) <= torch.finfo(fp8).max / 8


def test_a_wrong_kernel_would_be_seen() -> None:
    def scaled(*arguments: object, **options: object) -> torch.Tensor:
        return 1.01 * reference.add_norm(*arguments, **options)  # type: ignore[arg-type]

    assert norm_difference(SimpleNamespace(add_norm=scaled), reference, "branch", 3, 70, FLOAT32) > 1e-3
