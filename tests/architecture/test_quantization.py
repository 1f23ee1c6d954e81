"""Bytes of quantised checkpoints, computed without their weight files, and the data type of their KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from configs import published_config

from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.architecture.parameters import Parameters
from llmsched.engine.architecture.quantization import (
    QUANTIZATIONS,
    Quantization,
    quantised_config,
    quantization_of,
    with_quantization_file,
)
from llmsched.engine.architecture.weights import model_weights, stored_bytes
from llmsched.engine.errors import ConfigError, ModelError

GIB = 1 << 30
COUNTED = Parameters(linear=1 << 20, experts=1 << 21, embeddings=1000, other=100, encoders=10)
PLAIN = 2 * (1000 + 100 + 10)
LLAMA_70B = published_config("meta-llama--Meta-Llama-3.1-8B")
LLAMA_70B |= {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}


def read(settings: Mapping[str, Any]) -> Quantization:
    found = quantization_of(read_fields({"quantization_config": settings}))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("settings", "linear_bits", "expert_bits"),
    [
        ({"quant_method": "mxfp4"}, 16, 4.25),
        ({"quant_method": "fp8"}, 8, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2, 8 + 32 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4.125, 4.125),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 8, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}},
            },
            4.125,
            4.125,
        ),
    ],
)
def test_bits_of_each_format(settings: dict[str, Any], linear_bits: float, expert_bits: float) -> None:
    form = read(settings)
    assert form.known
    packed = ((1 << 20) * linear_bits + (1 << 21) * expert_bits) / 8
    assert stored_bytes({"model": COUNTED}, form, dtype_bytes=2).total == PLAIN + round(packed)


@pytest.mark.parametrize(
    "settings",
    [{"quant_method": ""}, {"quant_method": "hqq"}, {"quant_method": "awq"}, {"quant_method": "compressed-tensors"}],
)
def test_a_format_that_is_not_known_is_not_guessed(settings: dict[str, Any]) -> None:
    assert not read(settings).known


@pytest.mark.parametrize(
    ("config", "gib"),
    [
        ("openai--gpt-oss-20b", 12.82),  # 13,761,264,768 bytes of safetensors on the hub
        ("deepseek-ai--DeepSeek-V3", 626.9),
        ("nvidia--Gemma-4-31B-IT-NVFP4", 30.4),
        (
            LLAMA_70B
            | {
                "quantization_config": {"quant_method": "compressed-tensors"}
                | {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
            },
            67.72,
        ),
    ],
)
def test_published_quantised_models(config: dict[str, Any] | str, gib: float) -> None:
    content = config if isinstance(config, dict) else published_config(config)
    weights = model_weights(None, read_fields(content), dtype_bytes=2, packed=False)
    assert weights.count == pytest.approx(gib * GIB, rel=0.002)
    assert not weights.exact
    assert any("quantised" in note for note in weights.notes)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"quant_method": "fp8"}, False),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),
        ({"kv_cache_scheme": {"num_bits": 8}}, True),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, False),
        ({"kv_cache_scheme": None}, False),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_quant_algo": None}, False),
        ({"kv_cache_scheme": "FP8"}, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": "fp8_e4m3"}, True),
        ({"kv_cache_scheme": "auto"}, False),
    ],
)
def test_fp8_weights_alone_do_not_mean_an_fp8_cache(settings: dict[str, Any], wanted: bool) -> None:
    assert read(settings).fp8_kv == wanted


def test_an_unquantised_config_has_no_format() -> None:
    assert quantization_of(read_fields({"model_type": "llama"})) is None
    assert quantization_of(read_fields({"quantization_config": {}})) is None


def test_a_plain_config_is_read_as_a_quantised_one() -> None:
    plain = {"model_type": "llama", "hidden_size": 64}
    for name, settings in QUANTIZATIONS.items():
        assert read(settings).known
        assert quantised_config(plain, name) == plain | {"quantization_config": settings}
    with pytest.raises(ConfigError, match=r"quantization: must be one of fp8, .*, got 'fp7'"):
        quantised_config(plain, "fp7")
    with pytest.raises(ConfigError, match=r"awq cannot be applied: the checkpoint is already quantised \(fp8\)"):
        quantised_config(quantised_config(plain, "fp8"), "awq")


@pytest.mark.parametrize(
    ("settings", "doubt"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4' is not understood"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme {'num_bits': 8, 'type': 'int'} is not"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "does not say how KV is stored"),
        ({"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "does not say how KV is stored"),
        ({"quant_method": "quark"}, "does not say how KV is stored"),
        ({"quant_method": "gptq", "bits": 4, "kv_cache_bits": 8}, "kv_cache_bits 8 is not understood"),
    ],
)
def test_kv_that_is_not_understood_is_never_exact(settings: dict[str, Any], doubt: str) -> None:
    assert not read(settings).fp8_kv
    geometry = kv_geometry(LLAMA_70B | {"quantization_config": settings})
    assert geometry.confidence == "estimate"
    assert any(doubt in note for note in geometry.notes)


#: Names of modules with 100 weights each, and the class of these.
MODULES = {
    "model.layers.0.self_attn.q_proj": Parameters(linear=100),
    "model.layers.1.self_attn.q_proj": Parameters(linear=100),
    "model.layers.11.self_attn.q_proj": Parameters(linear=100),
    "model.layers.0.mlp.down_proj": Parameters(linear=100),
    "model.layers.1.mlp.experts.0.up_proj": Parameters(experts=100),
    "model": Parameters(embeddings=100),
}


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.1.self_attn"]}, (100, 200, 100, 100, 100)),
        ({"quant_method": "fp8", "modules_to_not_convert": "self_attn"}, (200, 200, 200, 100, 100)),
        ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "lm_head"]}, (200, 200, 200, 100, 100)),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, (200, 200, 200, 200, 53)),
        ({"quant_algo": "FP8", "exclude_modules": ["model.language_model.layers.1*"]}, (100, 200, 200, 100, 200)),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "ignore": ["*mlp*"]}, (56, 56, 56, 200, 200)),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                    "model.layers.0.mlp.down_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128},
                    "model.layers.1.mlp.experts": {"quant_algo": "NVFP4"},
                },
            },
            (100, 200, 200, 52, 56),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float"}},
                    "group_1": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}},
                },
                "ignore": ["lm_head", r"re:^model\.layers\.0\.self_attn.*"],
            },
            (200, 100, 100, 100, 50),
        ),
        (
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": -1,
                "dynamic": {r"-:.*self_attn.*": {}, r"+:.*down_proj": {"bits": 8}},
            },
            (200, 200, 200, 100, 50),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": -1, "modules_to_not_convert": ["mlp"]},
            (50, 50, 50, 200, 200),
        ),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["down_proj"]}, (100, 100, 100, 200, 100)),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, (100, 100, 100, 100, 53)),
    ],
)
def test_modules_have_formats_of_their_own(settings: dict[str, Any], sizes: tuple[int, ...]) -> None:
    form = read(settings)
    found = [stored_bytes({name: counted}, form, dtype_bytes=2).total for name, counted in MODULES.items()]
    assert found == [*sizes, 200]


def test_a_pattern_that_is_no_regular_expression_is_named() -> None:
    with pytest.raises(ModelError, match=r"quantization_config has an invalid pattern '\(' "):
        read({"quant_method": "compressed-tensors", "ignore": ["re:("]})


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "ignored_layers": [1]},
        {"quant_method": "compressed-tensors", "config_groups": ["fp8"]},
    ],
)
def test_settings_of_a_wrong_form_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"quantization_config is not in the form of {settings['quant_method']}"):
        read(settings)


def test_the_file_beside_the_config_is_read(tmp_path: Path) -> None:
    file = tmp_path / "hf_quant_config.json"
    assert with_quantization_file(LLAMA_70B, tmp_path) == LLAMA_70B
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": described}))
    fields = read_fields(with_quantization_file(LLAMA_70B, tmp_path))
    assert model_weights(None, fields, dtype_bytes=2).count == pytest.approx(67.67 * GIB, rel=0.001)
    form = quantization_of(fields)
    assert (form.method, form.fp8_kv, form.arithmetic) == ("modelopt FP8", True, "fp8")
    own = LLAMA_70B | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    merged = with_quantization_file(own, tmp_path)["quantization_config"]
    assert (merged["quant_algo"], merged["kv_cache_quant_algo"]) == ("NVFP4", "FP8")
    file.write_text("[]")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: holds a list"):
        with_quantization_file(LLAMA_70B, tmp_path)
