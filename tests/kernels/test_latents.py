"""Latent attention: the reference against keys and values of all heads, the CPU against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import Shape, make_batch
from latent_batches import CASES, MIXED, LatentCase, latent_batch, latent_rotary_difference, layer_of

from llmsched.kernels import dispatch, latents, reference
from llmsched.kernels.cpu import ops
from llmsched.kernels.fp8 import FP8_TYPES, restored
from llmsched.kernels.latents import LatentWidths, absorbed, expanded, released
from llmsched.kernels.triton import latent_attention as on_gpu
from llmsched.kernels.triton.tiling import Gpu


@pytest.mark.parametrize("fp8", [None, FP8_TYPES[0]], ids=str)
def test_the_reference_is_attention_over_expanded_keys_and_values(fp8: torch.dtype | None) -> None:
    case = CASES["mixed"]
    (query, cache, ropes, weight, tables, *lengths), options = latent_batch(case, fp8=fp8)
    scales = (None, None) if fp8 is None else options["kv_scales"]
    vectors, rope = (
        restored(each.flatten(0, 2)[:, None], row)[:, 0] for each, row in zip((cache, ropes), scales, strict=True)
    )
    keys, values = expanded(vectors, weight, case.heads, case.widths.key)
    keys = torch.cat([keys, rope.expand(case.heads, -1, -1)], 2)
    keys, values = (part.unflatten(1, (-1, case.block_size)).transpose(0, 1).contiguous() for part in (keys, values))
    expected = reference.paged_attention(query, keys, values, tables, *lengths, scale=options["scale"])
    found = reference.latent_attention(query, cache, ropes, weight, tables, *lengths, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_absorbed_products_are_the_same_attention() -> None:
    query, vectors, weight = torch.randn(3, 4, 16), torch.randn(7, 32), torch.randn(4 * 28, 32)
    keys, values = expanded(vectors, weight, 4, 16)
    scores = torch.einsum("qhr,kr->hqk", absorbed(query, weight), vectors)
    torch.testing.assert_close(scores, torch.einsum("qhd,hkd->hqk", query, keys), rtol=1e-4, atol=1e-4)
    weights = scores.softmax(2)
    sums = torch.einsum("hqk,kr->qhr", weights, vectors)
    expected = torch.einsum("hqk,hkd->qhd", weights, values)
    torch.testing.assert_close(released(sums, weight, 12), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        *((torch.float32, fp8) for fp8 in FP8_TYPES),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_the_cpu_equals_the_reference(name: str, dtype: torch.dtype, fp8: torch.dtype | None) -> None:
    batch, options = latent_batch(CASES[name], dtype=dtype, fp8=fp8)
    expected = reference.latent_attention(*batch, **options)
    found = dispatch.latent_attention(*batch, **options)
    assert found.dtype == dtype
    # In half types, absorbed queries and sums of latent vectors are rounded too.
    limit = 1e-5 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)


def test_heads_that_share_a_split_and_expansion_one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "EXPANDED_BYTES", 1)
    for heads in (8, 16, 5):
        batch, options = latent_batch(LatentCase(MIXED, heads=heads, widths=LatentWidths(64, 64, 16, 12)))
        expected = reference.latent_attention(*batch, **options)
        torch.testing.assert_close(ops.latent_attention(*batch, **options), expected, rtol=0, atol=1e-5)


def test_the_way_with_fewer_operations_is_chosen() -> None:
    widths = LatentWidths(512, 64, 128, 128)
    lengths, contexts = np.array([2048, 2048, 100, 250, 2]), np.array([2048, 60_000, 60_000, 60_000, 2])
    assert widths.expands(lengths, contexts).tolist() == [True, True, False, True, True]
    assert widths.heads_at_once(16, 2048, 2) == 16
    assert widths.heads_at_once(16, 1 << 20, 2) == 1


def test_parts_cover_all_tokens_once() -> None:
    case = LatentCase(((1, 9), (40, 40), (2, 500), (0, 7), (300, 300), (1, 1)), heads=16)
    shape, sequences = Shape("", case.sequences, 1, 1, 32, 8), case.sequences
    bounds, contexts = (each.numpy() for each in make_batch(shape).tensors[4:])
    parts = on_gpu.prepare_latents(layer_of(case), bounds, contexts, Gpu(132, 90), torch.from_numpy)
    tokens = torch.cat([part.tokens for part in parts if part.tokens is not None])
    assert sorted(tokens.tolist()) == list(range(sum(length for length, _ in sequences)))
    assert [part.expansion is not None for part in parts] == [True, False]
    decodes = on_gpu.prepare_latents(
        layer_of(case), np.arange(4, dtype=np.int32), np.array([5, 1, 900], np.int32), Gpu(132, 90), torch.from_numpy
    )
    assert [(part.tokens, part.expansion) for part in decodes] == [(None, None)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(111, 32)}, r"a weight \(111, 32\) does not fit queries"),
        ({"weight": torch.zeros(112, 31)}, r"a weight \(112, 31\) does not fit queries"),
        ({"rope_keys": torch.zeros(1, 1, 16, 8)}, "may differ in head_dim only"),
    ],
)
def test_mismatches_are_refused(change: dict[str, Any], message: str) -> None:
    batch, options = latent_batch(CASES["decodes"])
    names = ("query", "latents", "rope_keys", "weight", "block_tables", "cu_seqlens_q", "context_lens")
    with pytest.raises(ValueError, match=message):
        dispatch.latent_attention(**{**dict(zip(names, batch, strict=True)), **options, **change})


def test_interleaved_pairs_are_those_of_transformers() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    query, rows = torch.randn(5, 3, 24), torch.randn(5, 40)
    angles = torch.randn(5, 4).repeat(1, 2)
    caches = torch.zeros(1, 1, 5, 32), torch.zeros(1, 1, 5, 8)
    wanted = apply_rotary_pos_emb_interleave(
        query[None, ..., 16:].transpose(1, 2), rows[None, None, :, 32:], angles.cos()[None], angles.sin()[None]
    )
    reference.rotate_and_write_latents(
        query, rows, torch.ones(32), angles.cos(), angles.sin(), *caches, torch.arange(5), eps=0.0, interleaved=True
    )
    torch.testing.assert_close(query[..., 16:].transpose(0, 1), wanted[0][0])
    torch.testing.assert_close(caches[1][0, 0], wanted[1][0, 0])
    assert latent_rotary_difference(ops, reference, torch.float32, interleaved=True) == 0


def test_long_contexts_of_few_new_tokens_are_not_expanded() -> None:
    lengths, contexts = np.array([2, 2, 1000], np.int32), np.array([16_386, 1 << 20, 1 << 20], np.int32)
    assert LatentWidths(512, 64, 128, 128).expands(lengths, contexts).tolist() == [False, False, True]
