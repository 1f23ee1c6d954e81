"""Facts that the transformers path finds out about a model, and models that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import WINDOW, build_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from llmsched.engine.errors import ModelError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.model.paged_cache import LayerShape
from llmsched.engine.model.probe import FULL, UNKNOWN, AttentionCall, check_keywords, probe, window_of
from llmsched.engine.model.recurrent_layers import RecurrentLayers
from llmsched.kernels.latents import LatentWidths

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "initializer_range": 0.2,
}


def from_type(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **changes})).float().eval()


def probed(model: Any) -> tuple[dict[int, AttentionCall], int]:
    return probe(model, RecurrentLayers(model))


def executor(model: Any, **settings: Any) -> TorchExecutor:
    return TorchExecutor(model, num_blocks=16, block_size=4, device="cpu", kv_dtype=torch.float32, **settings)


def test_shapes_come_from_the_model() -> None:
    shape = LayerShape(kv_heads=2, key_dim=32, value_dim=32)
    call = AttentionCall(shape, 32**-0.5, None, None, 4, 4)
    assert probed(build_model("qwen3")) == (dict.fromkeys(range(3), call), 320)
    calls, _ = probed(from_type("deepseek_v3", **MLA))
    assert [call.shape for call in calls.values()] == [LayerShape(kv_heads=1, key_dim=16, value_dim=8)] * 2
    assert [call.latent for call in calls.values()] == [LatentWidths(rank=16, rope=8, key=16, value=12)] * 2


def test_options_of_attention_come_from_the_model() -> None:
    calls, _ = probed(build_model("gemma2"))
    assert [(call.scale, call.softcap, call.shape.window) for call in (calls[0], calls[1])] == [
        (24**-0.5, 5.0, WINDOW),
        (24**-0.5, 5.0, None),
    ]
    assert all(call.sinks is not None for call in probed(build_model("gpt_oss"))[0].values())


def test_latent_attention_of_an_unknown_kind_is_refused() -> None:
    model = from_type("deepseek_v3", **MLA)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = torch.nn.Sequential(layer.self_attn.kv_b_proj)
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM has latent attention of an unknown kind"):
        probed(model)


def test_windows_are_recognised_far_beyond_the_probe() -> None:
    assert window_of(causal_mask_function, CPU) == FULL
    for window in (1, 2, WINDOW, 4096, 1 << 20):
        assert window_of(sliding_window_causal_mask_function(window), CPU) == window
    assert window_of(sliding_window_causal_mask_function(1 << 22), CPU) == FULL
    assert window_of(bidirectional_mask_function, CPU) == UNKNOWN
    for chunk in (2, 1024, 8192, 1 << 20):
        assert window_of(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64)), CPU) == UNKNOWN
    table = torch.zeros(64, dtype=torch.int64)
    assert window_of(lambda _batch, _head, query, key: table[query] == table[key], CPU) == UNKNOWN


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bloom", {"n_head": 4}, "position_ids"),
        ("falcon", {"alibi": False}, "attention interface"),
        ("llama4_text", {"intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8}, "neither causal nor"),
        ("bert", {"is_decoder": False}, "neither causal nor"),
        ("diffllama", {}, "twice"),
        ("nemotron", {}, "does not receive the keywords"),
        ("recurrent_gemma", {"lru_width": 48, "num_hidden_layers": 3}, "layer 0 does not match"),
    ],
)
def test_refused_architectures(model_type: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        probed(from_type(model_type, **changes))


def test_tokens_that_meet_outside_attention_are_refused() -> None:
    model = build_model("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, output: output + output.roll(1, dims=1))
    with pytest.raises(ModelError, match="mixes tokens outside attention"):
        probed(model)


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    model = build_model("mistral")
    model.config.sliding_window = None
    probed(model)
    gemma = build_model("gemma2")
    gemma.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ModelError, match=f"layer 0 gets a sliding window of no tokens but its mask has {WINDOW}"):
        probed(gemma)


def test_unknown_keywords_are_refused() -> None:
    module = torch.nn.Linear(1, 1)
    check_keywords(module, {"dropout": 0.0, "is_causal": True, "position_ids": torch.zeros(1), "position_bias": None})
    for keywords in (
        {"position_bias": torch.zeros(1)},
        {"indices": torch.zeros(1)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"softcap_of_next_year": 30.0},
    ):
        with pytest.raises(ModelError, match=f"Linear passes '{next(iter(keywords))}' to attention"):
            check_keywords(module, keywords)


def longrope(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original, **factors}


def test_a_context_that_changes_the_rotation_of_its_neighbours_is_refused() -> None:
    changes = {"rope_parameters": longrope(32), "original_max_position_embeddings": 32}
    assert executor(build_model("phi3", **changes), max_model_len=32).vocab_size == 320
    with pytest.raises(ModelError, match=r"beyond 32 tokens.*max_model_len is 33, choose 32 or less"):
        executor(build_model("phi3", **changes), max_model_len=33)


def test_two_engines_in_one_process_do_not_meet() -> None:
    prompt = list(range(4, 24))
    models = {seed: build_model("gemma3", seed=seed) for seed in (1, 2)}
    with torch.inference_mode():
        expected = {seed: model(input_ids=torch.tensor([prompt])).logits[0] for seed, model in models.items()}
    steppers = {
        seed: Stepper(executor(models[seed]), [make_sequence("same name", prompt)], 24, seed=seed) for seed in models
    }
    found: dict[int, list[torch.Tensor]] = {seed: [] for seed in models}
    for _ in range(4):
        for seed, stepper in steppers.items():
            found[seed].append(stepper.executor.logits([row for _, row in stepper.rows((5,))]))
            stepper.computed[0] += 5
    for seed, logits in found.items():
        torch.testing.assert_close(torch.cat(logits), expected[seed], rtol=0, atol=1e-4)
