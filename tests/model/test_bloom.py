"""BLOOM's own path: slopes for any number of heads, both ways of the residual connection, half-precision weights."""

from __future__ import annotations

import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import VOCAB_SIZE, build_model
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.model.bloom import alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 71, 112])
def test_slopes_equal_those_of_transformers(heads: int) -> None:
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("after_norm", [True, False])
def test_the_residual_connection_starts_where_the_config_says(after_norm: bool) -> None:
    model = build_model("bloom", seed=3, apply_residual_connection_post_layernorm=after_norm)
    prompt = torch.randint(4, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(input_ids=prompt[None]).logits[0]
    executor = TorchExecutor(model, num_blocks=20, block_size=4, device="cpu", kv_dtype=torch.float32)
    [found] = Stepper(executor, [make_sequence("a", prompt.tolist())], 40).logits((7, 1, 1000))
    assert float((found - expected).abs().max()) < 1e-4


def test_bfloat16_stays_near_float32() -> None:
    """Compare with float32: the biases stay exact, unlike in transformers, so only weights and activations differ."""
    prompt = torch.randint(4, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        executor = TorchExecutor(
            build_model("bloom", seed=3).to(dtype), num_blocks=20, block_size=4, device="cpu", kv_dtype=dtype
        )
        logits.append(Stepper(executor, [make_sequence("a", prompt)], 40).logits((1000,))[0].float())
    assert float((logits[0] - logits[1]).abs().mean()) < 0.02 * float(logits[0].std())
