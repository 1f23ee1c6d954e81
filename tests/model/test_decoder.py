"""Fused decoder: equal logits for every architecture that it knows, shared weights, and models that it leaves alone."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import VOCAB_SIZE, WINDOW, build_model

from llmsched.engine.build import tensor_bytes
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.model.transformers_model import paged_model

LENGTHS = (37, 5, 16, 1, 64)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
}

#: Models that the fused decoder knows: architecture and changes to the config.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "phi3 with window": ("phi3", {"sliding_window": WINDOW}),
    "phi3 long rope": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "exact GELU": ("llama", {"hidden_act": "gelu"}),
    "partial rotary": ("phi3", {"partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox without parallel residual": ("gpt_neox", {"use_parallel_residual": False}),
    "phi": ("phi", {}),
    "starcoder2": ("starcoder2", {}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 24, "num_experts_per_tok": 5}),
    "olmoe": ("olmoe", {"clip_qkv": 0.5}),
    "granitemoe": ("granitemoe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v2": ("deepseek_v2", {"rope_parameters": YARN}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3 with biases": ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", {"rope_interleave": False}),
    "minicpm3": ("minicpm3", {}),
    "youtu": ("youtu", {}),
}
#: Variants of models that only the fused decoder can run; executor/test_parity.py has the usual ones.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom, residual after norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "mpt with limits": ("mpt", {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.1}}),
    "falcon 7b with ALiBi": ("falcon", {"alibi": True}),
    "falcon 11b": ("falcon_new", {"num_ln_in_parallel_attn": 1}),
    "stablelm with parallel residual": ("stablelm", {"use_parallel_residual": True}),
}
#: Models that it leaves to transformers: architecture, changes, and what it says.
UNKNOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "another model": ("gpt2", {}, "the decoder .*wpe"),
    "another activation": ("llama", {"hidden_act": "relu"}, "activation .* is unknown"),
    "latent attention": ("minicpm3", {"hidden_act": "relu"}, "activation .* is unknown"),
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def executor(case: str, impl: Any, dtype: torch.dtype = torch.float32, layout: KVLayout | None = None) -> TorchExecutor:
    arch, changes = (KNOWN | ALONE)[case]
    model = build_model(arch, seed=3, **changes).to(dtype)
    sizes: dict[str, Any] = {"num_blocks": 600, "block_size": 4, "device": "cpu", "kv_dtype": dtype, "layout": layout}
    return TorchExecutor(model, **sizes, model_impl=impl)


def logits(made: TorchExecutor, chunks: tuple[int, ...]) -> torch.Tensor:
    sequences = [make_sequence(str(index), prompt) for index, prompt in enumerate(prompts())]
    return torch.cat(Stepper(made, sequences, max(LENGTHS), seed=len(chunks)).logits(chunks)).float()


@cache
def expected(case: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return logits(executor(case, "transformers", dtype), (1000,))


@cache
def expected_alone(case: str) -> torch.Tensor:
    """Return the logits of the model itself."""
    arch, changes = ALONE[case]
    model = build_model(arch, seed=3, **changes)
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.tensor([prompt])).logits[0] for prompt in prompts()])


@pytest.mark.parametrize("case", [*KNOWN, *ALONE])
def test_logits_equal_those_of_transformers(case: str) -> None:
    fused = executor(case, "fused")
    assert fused.model_impl == "fused"
    for chunks in ((1000,), (17, 1, 7)):
        wanted = expected_alone(case) if case in ALONE else expected(case)
        assert float((logits(fused, chunks) - wanted).abs().max()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3", "phi3", "gpt_neox", "phi", "youtu"])
def test_half_types_stay_near_transformers(case: str, dtype: torch.dtype) -> None:
    """Rounding differs. So the mean difference is compared with that of transformers in the same type."""
    rounding = (expected(case, dtype) - expected(case)).abs().mean()
    for chunks in ((1000,), (1, 7)):
        difference = (logits(executor(case, "fused", dtype), chunks) - expected(case)).abs().mean()
        assert float(difference) < 1.5 * float(rounding)


def test_layers_in_groups() -> None:
    """Layers with windows have block tables and slots of their own."""
    fused = executor("gemma3", "fused", layout=KVLayout(4, 1, 6, WINDOW))
    assert float((logits(fused, (7, 1)) - expected("gemma3")).abs().max()) < 1e-4


def test_only_the_asked_rows_have_logits() -> None:
    found = [
        Stepper(executor("llama", impl), [make_sequence("a", prompts()[0], logprobs=3)], 64)
        for impl in ("fused", "transformers")
    ]
    for each in found:
        each.step((5,))
        each.step((1000,))
    fused, plain = (each.results[0][-1] for each in found)
    assert fused.token_id == plain.token_id
    assert fused.logprob.logprob == pytest.approx(plain.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("case", ["llama with biases", "qwen3", "phi3", "deepseek_v3"])
def test_weights_are_shared_with_the_model(case: str) -> None:
    """The model takes no more memory, computes the same as before, and a second decoder joins nothing again."""
    arch, changes = KNOWN[case]
    model = build_model(arch, seed=3, **changes)
    ids = torch.tensor([prompts()[0]])
    with torch.inference_mode():
        before, size = model(input_ids=ids).logits, tensor_bytes(model)
        paged_model(model, "fused")
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(input_ids=ids).logits, before)
    assert tensor_bytes(model) == size
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    paged_model(model, "fused")
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
        next(iter(model.model.layers[0].self_attn.children())).weight.mul_(2)
    assert tensor_bytes(model) == size


@pytest.mark.parametrize("case", UNKNOWN)
def test_other_models_run_through_transformers(case: str, caplog: pytest.LogCaptureFixture) -> None:
    arch, changes, reason = UNKNOWN[case]
    model = build_model(arch, **changes)
    with caplog.at_level(logging.INFO):
        assert paged_model(model, "auto").implementation == "transformers"
    assert "runs through transformers" in caplog.text
    with pytest.raises(ConfigError, match=f"model_impl: fused does not know {type(model).__name__}: .*({reason})"):
        paged_model(model, "fused")


def test_factors_between_modules_are_noticed() -> None:
    model = build_model("llama", seed=3)
    model.model.layers[1].register_forward_hook(lambda layer, inputs, output: 0.7 * output)
    with pytest.raises(ConfigError, match="its logits would differ by"):
        paged_model(model, "fused")


def test_what_the_comparison_of_logits_does_not_notice() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    config = AutoConfig.for_model("ministral3", **sizes, **heads)
    with pytest.raises(ConfigError, match="scaled by their positions"):
        paged_model(AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval(), "fused")


def test_transformers_can_be_asked_for() -> None:
    assert executor("llama", "transformers").model_impl == "transformers"
