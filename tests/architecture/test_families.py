"""The table of families against transformers: the same geometry and the same number of parameters as a built model."""

from __future__ import annotations

from typing import Any

import pytest

from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.families import FAMILIES
from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.architecture.parameters import Parameters, add_up, count_parameters
from llmsched.engine.architecture.vision import encoder_parameters
from llmsched.engine.architecture.weights import _built_modules, model_weights, modules_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 128,
    "quantization_config": None,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "use_qk_norm": True,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "hybrid_override_pattern": "ME*M-E",
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "n_embd": 64,
    "n_layer": 6,
    "n_head": 4,
    "n_positions": 64,
    "attention_out_bias": True,
    "use_qkv_bias": True,
    "use_parallel_residual": False,
    "qk_layernorm": False,
    "multi_query": True,
    "moe_shared_expert_intermediate_size": 40,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 4,
    "decoder_sparse_step": 1,
    "mamba_ssm_dtype": "float32",
    "mamba_ssm_cache_dtype": "float32",
    "num_global_key_value_heads": 1,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "bias": True,
    "alibi": False,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "do_layer_norm_before": True,
}
THIRDS = {
    "gpt_oss": "sliding_attention",
    "exaone4": "sliding_attention",
    "gemma4_text": "sliding_attention",
    "qwen3_5_text": "linear_attention",
    "qwen3_5_moe_text": "linear_attention",
}
#: Settings that are not needed, and that change what is counted.
FURTHER: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {"mlp_only_layers": [1], "decoder_sparse_step": 2, "attention_bias": True},
    "gemma3_text": {"num_hidden_layers": 7},
    "cohere": {"use_qk_norm": True},
    "olmoe": {"num_key_value_heads": 2, "attention_bias": True},
    "falcon": {"max_position_embeddings": 64},
    "gemma4_text": {"num_experts": 4, "moe_intermediate_size": 32, "top_k_experts": 2, "num_global_key_value_heads": 1},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {"attention_bias": True},
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "nemotron_h": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
#: Built as part of a whole that sees.
NESTED_ONLY = {"qwen2_vl", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}

#: Families that transformers does not know.
UNKNOWN = {"nemotron-nas", "openelm"}


def stated(family: str, *, tied: bool) -> dict[str, Any]:
    """Return a small config.json of the family with only the settings that it needs."""
    names = FAMILIES[family].needs - {"tie_word_embeddings"}
    settings = {name: SIZES[name] for name in names - {"layer_types"}}
    if family in THIRDS:
        settings["layer_types"] = [THIRDS[family], THIRDS[family], "full_attention"] * 2
    return {"model_type": family, "tie_word_embeddings": tied} | settings | FURTHER.get(family, {})


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        (family, tied)
        for family in sorted(FAMILIES.keys() - NESTED_ONLY - UNKNOWN)
        for tied in ((False,) if family == "nemotron_h" else (False, True))
    ],
)
def test_counting_agrees_with_building(family: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    content = stated(family, tied=tied)
    config = AutoConfig.for_model(**content, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    counted = count_parameters(read_fields(content))
    total = add_up(counted.values()).total
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert model_weights(None, read_fields(config), dtype_bytes=4).count == 4 * total


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNKNOWN))
def test_what_the_table_adds_is_what_the_class_adds(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    content = stated(family, tied=True)
    for without in (set(), FAMILIES[family].defaults.keys() & {"tie_word_embeddings"}):
        settings = {name: value for name, value in content.items() if name not in without}
        config = AutoConfig.for_model(**settings)
        with monkeypatch.context() as patch:
            patch.setattr("llmsched.engine.architecture.config_fields.transformers_config", pytest.fail)
            fields = read_fields(settings)
        assert kv_geometry(fields) == kv_geometry(config)
        asked = read_fields(config)
        for names in (("tie_word_embeddings",), ("vocab_size",), ("max_position_embeddings", "n_positions")):
            assert fields.get(*names, default=False) == asked.get(*names, default=False), names


VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {"out_hidden_size": 64},
    "mistral3": {"model_type": "pixtral", "head_dim": 8, "num_hidden_layers": 2, "image_size": 16},
    "qwen3_vl": {"deepstack_visual_indexes": [0, 1], "out_hidden_size": 64},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [1], "out_hidden_size": 64},
    "qwen3_5": {"deepstack_visual_indexes": [], "out_hidden_size": 64},
    "gemma3": {"vision_use_head": False, "image_size": 28, "patch_size": 14, "num_hidden_layers": 2},
    "gemma4": {"head_dim": 8, "num_key_value_heads": 4, "position_embedding_size": 10, "num_hidden_layers": 2},
}
TEXTS = {"qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl", "mistral3": "mistral"}
BLOCKS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 3,
    "num_heads": 4,
    "num_attention_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
}


@pytest.mark.parametrize("whole", VISION)
def test_vision_encoders_are_counted_as_they_are_built(whole: str) -> None:
    text = stated(TEXTS.get(whole, f"{whole}_text"), tied=True)
    nested = text if whole.startswith("qwen2") else {"text_config": text}  # those were published without the nesting
    content = nested | {"model_type": whole, "vision_config": BLOCKS | VISION[whole], "tie_word_embeddings": True}
    (counted, notes), built = modules_of(read_fields(content)), _built_modules(content)
    assert counted["encoders"].total > 0
    assert not notes
    assert add_up(counted.values()) == add_up(Parameters(*each) for each in built["modules"].values())


@pytest.mark.parametrize("missing", ["patch_size", "hidden_size"])
def test_vision_encoders_are_not_guessed(missing: str) -> None:
    vision = {name: value for name, value in (BLOCKS | VISION["qwen3_vl"]).items() if name != missing}
    assert encoder_parameters({"model_type": "qwen3_vl", "text_config": {}, "vision_config": vision}) is None
    assert encoder_parameters({"model_type": "other", "vision_config": BLOCKS}) is None
    assert encoder_parameters({"model_type": "gemma3", "vision_config": BLOCKS, "audio_config": {"depth": 2}}) is None
    assert encoder_parameters({"model_type": "llama"}) == 0
