"""Specification against independent computations: torch's attention and transformers' eager attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from batches import MIXED, SHAPES, Batch, Shape, make_batch
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.bloom import modeling_bloom
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from llmsched.kernels import reference
from llmsched.kernels.fp8 import FP8_TYPES


def hugging_face_mask(q_len: int, context: int, window: int | None) -> torch.Tensor:
    visible = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    queries = torch.arange(context - q_len, context)[:, None]
    return visible(0, 0, queries, torch.arange(context)[None, :])


def dense_attention(shape: Shape, batch: Batch) -> torch.Tensor:
    """Attend to each sequence alone, from its contiguous keys and values, with the code of transformers."""
    outputs = []
    bounds = batch.cu_seqlens_q.tolist()
    for index, (q_len, context) in enumerate(shape.sequences):
        query = batch.query[bounds[index] : bounds[index + 1]].transpose(0, 1)[None]
        key, value = batch.keys[index].transpose(0, 1)[None], batch.values[index].transpose(0, 1)[None]
        visible = hugging_face_mask(q_len, context, shape.window)
        additive = torch.zeros(1, 1, q_len, context).masked_fill(~visible, torch.finfo(torch.float32).min)
        module = SimpleNamespace(
            num_key_value_groups=shape.heads // shape.kv_heads, training=False, sinks=batch.options.get("sinks")
        )
        scale = batch.options["scale"]
        if q_len == 0:
            continue
        if shape.sinks:
            output, _ = modeling_gpt_oss.eager_attention_forward(module, query, key, value, additive, scaling=scale)
        elif shape.softcap is not None:
            output, _ = modeling_gemma2.eager_attention_forward(
                module, query, key, value, additive, scaling=scale, softcap=shape.softcap
            )
        elif shape.slopes:
            distance = torch.arange(context) - torch.arange(context - q_len, context)[:, None]
            falling = batch.options["slopes"][:, None, None] * distance
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=additive + falling, scale=scale, enable_gqa=True
            ).transpose(1, 2)
        else:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=scale, enable_gqa=True
            ).transpose(1, 2)
        outputs.append(output[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("fp8", [None, *FP8_TYPES], ids=str)
@pytest.mark.parametrize("shape", [s for s in SHAPES if not (s.sinks and s.softcap)], ids=str)
def test_equals_dense_attention(shape: Shape, fp8: torch.dtype | None) -> None:
    batch = make_batch(shape, fp8=fp8)
    actual = reference.paged_attention(*batch.tensors, **batch.options)
    torch.testing.assert_close(actual, dense_attention(shape, batch), rtol=0, atol=1e-5)


def test_slopes_are_those_of_transformers_alibi() -> None:
    """BLOOM adds slope x key position, whatever the query's: the softmax does not see the difference."""
    batch = make_batch(Shape("", ((9, 40),), heads=4, kv_heads=4))
    bias = modeling_bloom.build_alibi_tensor(torch.ones(1, 40), 4, torch.float32)
    query, key, value = batch.query.transpose(0, 1), batch.keys[0].transpose(0, 1), batch.values[0].transpose(0, 1)
    scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=batch.options["scale"])
    hidden = ~hugging_face_mask(9, 40, None)
    expected = torch.bmm(torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1), value).transpose(0, 1)
    slopes = bias[:, 0, 1]
    actual = reference.paged_attention(*batch.tensors, **batch.options, slopes=slopes)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_softcap_acts_before_the_sink_joins() -> None:
    """Two keys and a sink, by hand: c tanh(s / c) for the scores only."""
    query = torch.tensor([[[1.0, 0.0]]])
    keys = torch.tensor([[[[2.0, 0.0], [4.0, 0.0]]]])
    values = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    output = reference.paged_attention(
        query,
        keys,
        values,
        torch.tensor([[0]], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        scale=0.5,
        softcap=1.5,
        sinks=torch.tensor([5.0]),
    )
    exponentials = torch.exp(torch.tensor([1.5 * torch.tanh(torch.tensor(s / 1.5)) for s in (1.0, 2.0)] + [5.0]))
    torch.testing.assert_close(output[0, 0], (exponentials / exponentials.sum())[:2])


def test_window_counts_the_query_itself() -> None:
    """transformers: key k is visible iff k > q - window, so window 1 is the token's own value."""
    shape = Shape("", ((1, 9), (5, 5)), window=1, heads=2, kv_heads=2)
    batch = make_batch(shape)
    output = reference.paged_attention(*batch.tensors, **batch.options)
    torch.testing.assert_close(output, torch.cat([batch.values[0][-1:], batch.values[1]]))


@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 17])
def test_chunks_equal_the_whole(chunk: int) -> None:
    shape = Shape("", ((50, 50),), window=20)
    whole = make_batch(shape)
    expected = reference.paged_attention(*whole.tensors, **whole.options)
    for start in range(0, 50, chunk):
        stop = min(start + chunk, 50)
        actual = reference.paged_attention(
            whole.query[start:stop],
            whole.key_cache,
            whole.value_cache,
            whole.block_tables,
            torch.tensor([0, stop - start], dtype=torch.int32),
            torch.tensor([stop], dtype=torch.int32),
            **whole.options,
        )
        torch.testing.assert_close(actual, expected[start:stop], rtol=0, atol=5e-6)


def test_shared_blocks() -> None:
    """Two sequences with the same first two blocks see the same keys there."""
    apart = make_batch(Shape("", ((1, 40), (1, 40))))
    for cache, contents in ((apart.key_cache, apart.keys), (apart.value_cache, apart.values)):
        contents[1][:32] = contents[0][:32]
        cache[apart.block_tables[1, :2].long()] = cache[apart.block_tables[0, :2].long()]
    expected = reference.paged_attention(*apart.tensors, **apart.options)
    apart.block_tables[1, :2] = apart.block_tables[0, :2]
    torch.testing.assert_close(reference.paged_attention(*apart.tensors, **apart.options), expected, rtol=0, atol=0)


def test_softmax_is_float32_for_bfloat16() -> None:
    """Rounding only the inputs and the output keeps within one unit of the output's last place."""
    batch = make_batch(Shape("", MIXED), dtype=torch.bfloat16)
    wide = [t.float() if t.is_floating_point() else t for t in batch.tensors]
    expected = reference.paged_attention(*wide, **batch.options)
    actual = reference.paged_attention(*batch.tensors, **batch.options)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected.bfloat16(), rtol=0, atol=0)
