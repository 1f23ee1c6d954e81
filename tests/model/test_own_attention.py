"""Models that compute attention themselves: slopes for any number of heads, bfloat16, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import VOCAB_SIZE, build_model
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.model.loader import open_model
from llmsched.engine.model.own_attention import alibi_slopes
from llmsched.engine.model.transformers_model import paged_model


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 71, 112])
def test_slopes_equal_those_of_transformers(heads: int) -> None:
    expected = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("heads", [2, 6, 8, 71])
def test_slopes_of_mpt_and_falcon_are_the_same(heads: int) -> None:
    found = alibi_slopes(heads)
    torch.testing.assert_close(-build_mpt_alibi_tensor(heads, 2)[:, 0, 0], found, rtol=1e-5, atol=0)
    rounded = falcon.build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(rounded, found.bfloat16().float(), rtol=2**-7, atol=0)


def test_they_run_only_in_the_fused_decoder() -> None:
    with pytest.raises(ConfigError, match=r"model_impl: MptForCausalLM does not use .* use auto or fused"):
        paged_model(build_model("mpt"), "transformers")
    model = build_model("stablelm", hidden_act="relu")
    with pytest.raises(ModelError, match=r"StableLmForCausalLM cannot be served: activation .* is unknown"):
        paged_model(model, "auto")


@pytest.mark.parametrize("arch", ["bloom", "mpt", "falcon", "falcon_alibi", "falcon_new"])
def test_bfloat16_stays_near_float32(arch: str) -> None:
    """Compare with float32: the biases stay exact, unlike in transformers, so only weights and activations differ."""
    prompt = torch.randint(4, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        executor = TorchExecutor(
            build_model(arch, seed=3).to(dtype), num_blocks=20, block_size=4, device="cpu", kv_dtype=dtype
        )
        logits.append(Stepper(executor, [make_sequence("a", prompt)], 40).logits((1000,))[0].float())
    assert float((logits[0] - logits[1]).abs().mean()) < 0.02 * float(logits[0].std())


@pytest.mark.parametrize("arch", ["bloom", "mpt", "falcon", "falcon_alibi", "falcon_new", "stablelm"])
def test_models_from_files_are_served(arch: str, tiny_model: Any) -> None:
    """Loading chooses the attention of transformers with which the decoder compares its logits."""
    model = open_model(EngineConfig(model=str(tiny_model(arch)), device="cpu", dtype="float32")).load()
    assert paged_model(model).implementation == "fused"
