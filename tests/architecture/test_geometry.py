"""KV bytes of real models. Configs are the published config.json files; the figures were worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from configs import CONFIGS, published_config

from llmsched.engine.architecture.config_fields import nested_text, read_config_file, read_fields
from llmsched.engine.architecture.geometry import LayerGroup, kv_geometry
from llmsched.engine.errors import ModelError
from llmsched.kernels.latents import LatentWidths

BF16, FP8 = 2, 1


class Wanted(NamedTuple):
    """Bytes per token of layers that keep all tokens and of window layers, the window, state bytes per sequence."""

    full: int
    windowed: int = 0
    window: int | None = None
    state: int = 0


FILES = {
    "meta-llama--Meta-Llama-3.1-8B": Wanted(131072),
    "Qwen--Qwen3-0.6B": Wanted(114688),
    "Qwen--Qwen3-30B-A3B": Wanted(98304),
    "Qwen--Qwen3-VL-4B-Instruct": Wanted(147456),
    "mistralai--Mixtral-8x7B-v0.1": Wanted(131072),
    "openai--gpt-oss-20b": Wanted(24576, 24576, 128),
    "deepseek-ai--DeepSeek-V3": Wanted(70272),
    "Qwen--Qwen3.5-27B": Wanted(65536, state=153944064),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Wanted(6144, state=49082368),
    "google--gemma-4-26B-A4B": Wanted(20480, 204800, 1024),
    "nvidia--Gemma-4-31B-IT-NVFP4": Wanted(81920, 819200, 1024),
    "nvidia--Llama-3.1-70B-Instruct-FP8": Wanted(327680),
    "deepseek-ai--DeepSeek-V3.2": Wanted(85888),
}
#: Models that transformers does not know as a whole.
UNKNOWN_TO_TRANSFORMERS = {
    "nvidia--Llama-3_3-Nemotron-Super-49B-v1": Wanted(200704),
    "moonshotai--Kimi-K3": Wanted(27648, state=69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)),
}

OTHERS: dict[str, tuple[dict[str, Any], Wanted]] = {
    "Qwen2.5-0.5B": (
        {"model_type": "qwen2", "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"hidden_size": 896, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24},
        Wanted(12288),
    ),
    "SmolLM2-135M": (
        {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"hidden_size": 576},
        Wanted(23040),
    ),
    "Llama-2-7b": (
        {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
        | {"hidden_size": 4096},
        Wanted(524288),
    ),
    "falcon-7b": (
        {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": 71}
        | {"hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False},
        Wanted(8192),
    ),
    "falcon-40b": (
        {"model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8}
        | {"hidden_size": 8192, "multi_query": True, "new_decoder_architecture": True},
        Wanted(2 * 60 * 8 * 64 * 2),
    ),
    "starcoder": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True},
        Wanted(2 * 40 * 1 * 128 * 2),
    ),
    "phi-2": (
        {"model_type": "phi", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32}
        | {"hidden_size": 2560},
        Wanted(327680),
    ),
    "gemma-7b": (
        {"model_type": "gemma", "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"hidden_size": 3072, "head_dim": 256},
        Wanted(458752),
    ),
    "bloom-560m": (
        {"model_type": "bloom", "n_layer": 24, "num_attention_heads": 16, "n_embed": 1024},
        Wanted(98304),
    ),
    "gemma-3-4b-it, whose text_config leaves class defaults out": (
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
            | {"num_hidden_layers": 34, "sliding_window": 1024},
            "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152},
        },
        Wanted(20480, 118784, 1024),
    ),
    "Mistral-7B-v0.1, a window in every layer": (
        {"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"hidden_size": 4096, "sliding_window": 4096},
        Wanted(0, 131072, 4096),
    ),
    "gemma-2-9b, alternating by class default": (
        {"model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"hidden_size": 3584, "head_dim": 256, "sliding_window": 4096},
        Wanted(21 * 2 * 8 * 256 * 2, 21 * 2 * 8 * 256 * 2, 4096),
    ),
    "gemma-3n, whose last layers use the KV of earlier ones": (
        {"model_type": "gemma3n_text", "num_hidden_layers": 35, "num_kv_shared_layers": 15, "sliding_window": 512}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
        | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
        Wanted(4 * 2 * 2 * 256 * 2, 16 * 2 * 2 * 256 * 2, 512),
    ),
    "OpenELM-270M, with names and heads of its own": (
        {"model_type": "openelm", "num_transformer_layers": 16, "model_dim": 1280, "head_dim": 64, "vocab_size": 32000}
        | {"num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4, "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4}
        | {"ffn_multipliers": [1.0] * 16, "ffn_dim_divisor": 256, "qkv_multipliers": [0.5, 1.0], "num_gqa_groups": 4}
        | {"max_context_length": 2048, "share_input_output_layers": True, "normalize_qk_projections": True},
        Wanted(63 * 64 * 2 * 2),
    ),
    "Mamba-2 2.7B, all layers recurrent": (
        {"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 2560, "num_heads": 80, "head_dim": 64}
        | {"state_size": 128, "n_groups": 1, "expand": 2, "conv_kernel": 4, "chunk_size": 256},
        Wanted(0, state=169836544),
    ),
    "Falcon-Mamba 7B, all layers recurrent": (
        {"model_type": "falcon_mamba", "num_hidden_layers": 64, "hidden_size": 4096, "intermediate_size": 8192}
        | {"state_size": 16, "expand": 16, "conv_kernel": 4},
        Wanted(0, state=64 * (8192 * 16 * 4 + 3 * 8192 * 2)),
    ),
    "Qwen2 with a window in the layers from max_window_layers on": (
        {"model_type": "qwen2", "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"hidden_size": 256, "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 5},
        Wanted(5 * 2 * 2 * 64 * 2, 3 * 2 * 2 * 64 * 2, 128),
    ),
    "RecurrentGemma, a window and two recurrences in turn": (
        {"model_type": "recurrent_gemma", "num_hidden_layers": 26, "num_attention_heads": 10, "num_key_value_heads": 1}
        | {"hidden_size": 2560, "lru_width": 2560, "attention_window_size": 2048, "conv1d_width": 4}
        | {"_block_types": ["recurrent", "recurrent", "attention"]},
        Wanted(0, 8 * 2 * 256 * 2, 2048, state=18 * (2560 * 4 + 3 * 2560 * 2)),
    ),
    "Jamba, one attention layer of eight": (
        {"model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}
        | {"mamba_d_conv": 4, "mamba_expand": 2},
        Wanted(4 * 2 * 8 * 128 * 2, state=28 * (8192 * 16 * 4 + 3 * 8192 * 2)),
    ),
}


def measured(config: Any) -> Wanted:
    geometry = kv_geometry(config)
    return Wanted(
        geometry.kv_bytes_per_token(BF16),
        geometry.kv_bytes_per_token_window(BF16),
        geometry.window,
        geometry.state_bytes_per_seq,
    )


@pytest.mark.parametrize("name", FILES | UNKNOWN_TO_TRANSFORMERS)
def test_published_configs(name: str) -> None:
    config = published_config(name)
    assert measured(config) == (FILES | UNKNOWN_TO_TRANSFORMERS)[name]
    assert kv_geometry(config).confidence == ("estimate" if "Kimi" in name else "exact")


@pytest.mark.parametrize("name", FILES | UNKNOWN_TO_TRANSFORMERS)
def test_nested_and_plain_configs_give_the_same(name: str) -> None:
    config = published_config(name)
    text = nested_text(config)
    other = text if text is not None else {"model_type": "a_model_that_sees", "text_config": config}
    assert kv_geometry(other).groups == kv_geometry(config).groups


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    config, wanted = OTHERS[name]
    assert measured(config) == wanted
    assert kv_geometry(config).confidence == "exact"


@pytest.mark.parametrize("name", FILES)
def test_the_file_and_the_config_that_transformers_makes_of_it_agree(name: str) -> None:
    from transformers import AutoConfig

    path = CONFIGS / f"{name}_config.json"
    assert measured(AutoConfig.from_pretrained(path)) == measured(read_config_file(path))


def test_plain_families_are_read_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(outer: Any) -> None:
        raise AssertionError("asked transformers")

    monkeypatch.setattr("llmsched.engine.architecture.config_fields.transformers_config", refuse)
    for name in ("meta-llama--Meta-Llama-3.1-8B", "Qwen--Qwen3-0.6B", "openai--gpt-oss-20b"):
        assert measured(published_config(name)) == FILES[name]


# Geometries that published calculators get wrong, by the shape alone (no model_type).


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "kv_heads", "head_dim", "wanted"),
    [
        (40, 5120, 32, 8, 128, 163840),
        *((36, 2560, 32, 8, 128, 147456), (36, 2560, 32, 8, None, 92160)),
        *((24, 2880, 64, 8, 64, 49152), (24, 2880, 64, 8, None, 34560)),
    ],
)
def test_head_dim_in_both_directions(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int | None, wanted: int
) -> None:
    config = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    assert measured(config).full == wanted


def test_hidden_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ModelError, match="hidden_size 100 does not divide into 32 heads"):
        kv_geometry({"num_hidden_layers": 1, "hidden_size": 100, "num_attention_heads": 32})


def test_layers_with_a_window_cost_a_short_sequence_as_much_as_full_ones() -> None:
    kinds = ["sliding_attention", "full_attention"] * 18
    config = {"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    geometry = kv_geometry(config | {"layer_types": kinds, "sliding_window": 128})
    assert geometry.bytes_per_token(BF16) == 73728
    assert geometry.kv_bytes_per_token(BF16) == geometry.kv_bytes_per_token_window(BF16) == 36864


@pytest.mark.parametrize("nested", ["text_config", "language_config", "llm_config"])
@pytest.mark.parametrize("outer", [{"num_hidden_layers": 33, "num_attention_heads": 4}, {}])
def test_the_nested_language_model_is_counted_not_the_vision_part(nested: str, outer: dict[str, int]) -> None:
    text = {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    assert measured(outer | {nested: text}).full == 163840


def test_hybrid_pattern_counts_attention_layers_only_and_state_once() -> None:
    pattern = "ME" * 36 + "*" * 8 + "MEMEMEME"
    config = {"hybrid_override_pattern": pattern, "num_attention_heads": 40, "num_key_value_heads": 2}
    config |= {"head_dim": 128, "mamba_num_heads": 96, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8}
    config |= {"conv_kernel": 4, "mamba_ssm_cache_dtype": "float32"}
    found = measured(config)
    assert found.full == 8192
    assert found.state == 40 * (96 * 80 * 128 * 4 + 3 * (96 * 80 + 2 * 8 * 128) * 2)


def test_fp8_halves_every_figure() -> None:
    for name in ("meta-llama--Meta-Llama-3.1-8B", "openai--gpt-oss-20b"):
        geometry = kv_geometry(published_config(name))
        assert 2 * geometry.kv_bytes_per_token(FP8) == geometry.kv_bytes_per_token(BF16)
        assert 2 * geometry.bytes_per_token(FP8) == geometry.bytes_per_token(BF16)


def test_mla_is_one_latent_and_one_rope_vector() -> None:
    geometry = kv_geometry(published_config("deepseek-ai--DeepSeek-V3"))
    assert geometry.groups == (LayerGroup("mla", 61, 1, 512 + 64, 0, latent=LatentWidths(512, 64, 128, 128)),)
    assert geometry.bytes_per_token(BF16) == 61 * 576 * 2


def test_keys_and_values_of_different_width() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    assert measured(config | {"head_dim": 192, "v_head_dim": 128}).full == 2 * 4 * (192 + 128) * 2


@pytest.mark.parametrize("name", ["num_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads"])
def test_each_layer_has_kv_heads_of_its_own(name: str) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 32, "head_dim": 128}
    assert measured(config | {name: [4, 4, 2, 1]}).full == 5632
    with pytest.raises(ModelError, match="3 values of num_key_value_heads for 4 layers"):
        kv_geometry(config | {name: [4, 2, 1]})


def test_layers_with_a_window_may_have_heads_of_their_own() -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192}
    config |= {"v_head_dim": 128, "sliding_window": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 96}
    found = measured(config | {"swa_v_head_dim": 64, "hybrid_layer_pattern": [0, 1, 1, 0]})
    assert found == Wanted(2 * 4 * (192 + 128) * 2, 2 * 8 * (96 + 64) * 2, 128)


def test_blocks_describe_each_layer() -> None:
    blocks = [
        {"attention": attention, "ffn": {"ffn_mult": 1.0}}
        for attention in (
            {"n_heads_in_group": 8},
            {"no_op": True},
            {"replace_with_linear": True},
            {"num_key_value_heads": 2, "window_length": 64},
        )
    ]
    config = {"model_type": "nemotron-nas", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096}
    assert measured(config | {"block_configs": blocks}) == Wanted(4 * 2 * 128 * 2, 2 * 2 * 128 * 2, 64)
    complete = {"vocab_size": 9, "max_position_embeddings": 9, "tie_word_embeddings": False}
    with pytest.raises(ModelError, match="num_hidden_layers is 4, but layer_types lists 3"):
        kv_geometry(config | complete | {"block_configs": blocks[1:]})


def test_the_indexer_caches_one_key_per_layer() -> None:
    config = published_config("deepseek-ai--DeepSeek-V3.2")
    keys = 61 * 128
    assert kv_geometry(config).kv_bytes_per_token(BF16) == 70272 + keys * BF16
    assert kv_geometry(config).kv_bytes_per_token(FP8) == (70272 + keys * BF16) // 2
    without = kv_geometry({name: value for name, value in config.items() if name != "index_head_dim"})
    assert without.confidence == "estimate"
    assert any("does not state index_head_dim; 128 is assumed" in note for note in without.notes)


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"num_layers": 2, "index_head_dim": 128, "indexer_types": ["full", "shared"]}, Wanted(2 * (2 * 576 + 128))),
        ({"model_type": "longcat_flash", "num_layers": 3}, Wanted(2 * 6 * 576)),
    ],
)
def test_spellings_of_latent_attention(config: dict[str, Any], wanted: Wanted) -> None:
    assert measured(MLA | config) == wanted


@pytest.mark.parametrize("model_type", ["rwkv", "rwkv7", "xlstm"])
def test_recurrent_models_of_an_unknown_state_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(ModelError, match=f"{model_type} is a recurrent model whose state is not known"):
        kv_geometry({"model_type": model_type, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2})


# Unknown settings are marked or refused, never guessed.


def test_an_unknown_model_type_is_an_estimate_that_says_why() -> None:
    config = {"model_type": "from_the_future", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    geometry = kv_geometry(config)
    assert geometry.confidence == "estimate"
    assert any("from_the_future" in note for note in geometry.notes)
    assert any("num_key_value_heads is not given" in note for note in geometry.notes)


@pytest.mark.parametrize(
    ("extra", "note"),
    [
        ({"index_topk": 2048}, "index_topk"),
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads"),
        ({"model_type": "new", "layer_types": ["full_attention", "holographic"]}, "holographic"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "unknown kind and is not counted"),
        ({"sliding_window": 128}, "sliding_window 128"),
        (
            {"model_type": "new", "layer_types": ["full_attention"] * 3},
            "num_hidden_layers is 2, but layer_types lists 3",
        ),
    ],
)
def test_settings_that_are_not_understood_are_named(extra: dict[str, Any], note: str) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    geometry = kv_geometry(config | extra)
    assert geometry.confidence == "estimate"
    assert any(note in each for each in geometry.notes)


GROUPED = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers is None"),
        ({"num_hidden_layers": 0, "num_attention_heads": 4}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2, "hidden_size": 8}, "no attention heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2}, "neither head_dim nor hidden_size"),
        (
            published_config("openai--gpt-oss-20b") | {"num_hidden_layers": 23},
            "num_hidden_layers is 23, but layer_types lists 24",
        ),
        ({"num_hidden_layers": -4, "num_attention_heads": 4}, "num_hidden_layers is -4"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": -8}, "keys of -8"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": -2}, "-2 KV heads"),
        (GROUPED | {"num_key_value_heads": 3}, "4 attention heads, which is not a multiple of its 3 KV heads"),
        (GROUPED | {"num_key_value_heads": 8}, "4 attention heads, which is not a multiple of its 8 KV heads"),
        (GROUPED | {"num_kv_shared_layers": 2}, "num_kv_shared_layers 2; it must be less than 2 layers"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size 'wide'; it must be a whole number"),
        (GROUPED | {"model_type": "llama", "hidden_size": [64]}, "llama is invalid"),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        kv_geometry(config)


def test_files_that_are_not_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        read_config_file(tmp_path)
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_config_file(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1, 2]))
    with pytest.raises(ModelError, match="holds a list"):
        read_config_file(tmp_path / "config.json")


def test_read_fields_prefers_what_the_file_says() -> None:
    fields = read_fields({"model_type": "gemma", "num_hidden_layers": 3, "head_dim": 32})
    assert fields.get("num_hidden_layers") == 3
    assert fields.get("head_dim") == 32
    assert fields.get("num_attention_heads") == 16
    assert fields.get("no_such", default=7) == 7


def test_the_figures_with_all_tokens_kept_and_with_windows_freed() -> None:
    geometry = kv_geometry(published_config("openai--gpt-oss-20b"))
    kept = 32 * 8192 * geometry.bytes_per_token(BF16)
    freed = 32 * geometry.bytes_with_windows_freed(8192, BF16)
    assert kept == 12 << 30
    assert freed / (1 << 30) == pytest.approx(6.09, abs=0.005)


def test_state_counts_once_where_windows_are_freed() -> None:
    geometry = kv_geometry(published_config("Qwen--Qwen3.5-27B"))
    assert geometry.bytes_with_windows_freed(100, BF16) == 100 * 65536 + 153944064
