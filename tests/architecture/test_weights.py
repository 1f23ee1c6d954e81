"""Bytes of weights: from safetensors headers, from the config, and against models that are really built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import published_config
from safetensors.numpy import save_file

from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.architecture.weights import model_weights
from llmsched.engine.errors import ModelError

QWEN25_05B = {
    "model_type": "qwen2",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
OPENELM_270M = {
    "model_type": "openelm",
    "num_transformer_layers": 16,
    "model_dim": 1280,
    "head_dim": 64,
    "ffn_dim_divisor": 256,
    "ffn_multipliers": [0.5, 0.73, 0.97, 1.2, 1.43, 1.67, 1.9, 2.13, 2.37, 2.6, 2.83, 3.07, 3.3, 3.53, 3.77, 4.0],
    "ffn_with_glu": True,
    "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
    "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4,
    "normalize_qk_projections": True,
    "share_input_output_layers": True,
    "vocab_size": 32000,
    "max_context_length": 2048,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN25_05B | {"tie_word_embeddings": True}, 494032768),
        (QWEN25_05B | {"tie_word_embeddings": False}, 630167424),
        ("mistralai--Mixtral-8x7B-v0.1", 46702792704),
        ("meta-llama--Meta-Llama-3.1-8B", 8030261248),
        ("Qwen--Qwen3-30B-A3B", 30532122624),
        ("Qwen--Qwen3-0.6B", 596049920),
        ("Qwen--Qwen3-VL-4B-Instruct", 4437815808),
        ("Qwen--Qwen3.5-27B", 27356728560),
        ("google--gemma-4-26B-A4B", 25805933872),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31577937344),
        ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", 49867145216),
        (OPENELM_270M, 271527168),
    ],
)
def test_parameters_of_published_models(config: dict[str, Any] | str, parameters: int) -> None:
    content = config if isinstance(config, dict) else published_config(config)
    weights = model_weights(None, read_fields(content), dtype_bytes=2)
    assert weights.count == 2 * parameters
    assert weights.source == "config"
    assert weights.exact


def test_recurrent_layers_whose_weights_are_not_known_are_named() -> None:
    mamba = {"layer_types": ["mamba"] * 24, "mamba_d_state": 16, "mamba_d_conv": 4}
    with pytest.raises(ModelError, match="recurrent layers of a kind whose weights cannot be counted"):
        model_weights(None, read_fields(QWEN25_05B | mamba), dtype_bytes=2)


def test_headers_win_and_are_scaled_to_the_serving_type(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": np.zeros((10, 4), np.float32),
        "model.norm.weight": np.zeros(4, np.float16),
        "lm_head.weight": np.zeros((10, 4), np.float32),
        "model.layers.0.mlp.qweight": np.zeros((3, 5), np.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    untied = model_weights(tmp_path, read_fields(QWEN25_05B | {"tie_word_embeddings": False}), dtype_bytes=2)
    assert untied.count == 2 * (40 + 4 + 40) + 4 * 15
    assert untied.source == "safetensors"
    assert any("I32" in note for note in untied.notes)
    tied = model_weights(tmp_path, read_fields(QWEN25_05B | {"tie_word_embeddings": True}), dtype_bytes=4)
    assert tied.count == 4 * (40 + 4) + 4 * 15


def test_tensors_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    names = ["model.layers.23.mlp.weight", "model.layers.24.mlp.weight", "mtp.layers.0.weight", "visual.layers.30.w"]
    save_file({name: np.zeros(10, np.float32) for name in names}, tmp_path / "model.safetensors")
    weights = model_weights(tmp_path, read_fields(QWEN25_05B), dtype_bytes=2)
    assert weights.count == 2 * 20
    assert any("40 B of the files are for multi-token prediction" in note for note in weights.notes)


def test_shards_are_summed_and_a_missing_one_falls_back_to_the_config(tmp_path: Path) -> None:
    config = QWEN25_05B | {"tie_word_embeddings": True}
    save_file({"a": np.zeros(10, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(30, np.float32)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_weights(tmp_path, read_fields(config), dtype_bytes=2).count == 80
    (tmp_path / "two.safetensors").unlink()
    assert model_weights(tmp_path, read_fields(config), dtype_bytes=2).count == 2 * 494032768


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, (50).to_bytes(8, "little") + b"{"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        model_weights(tmp_path, read_fields(QWEN25_05B), dtype_bytes=2)


def test_a_quantised_checkpoint_without_files_is_an_estimate() -> None:
    weights = model_weights(
        None, read_fields(QWEN25_05B | {"quantization_config": {"quant_method": "awq"}}), dtype_bytes=2
    )
    assert not weights.exact
    assert any("awq" in note for note in weights.notes)


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "cannot be read as JSON"), ("version https://git-lfs.github.com/spec/v1", "Git LFS")]
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=rf"model\.safetensors\.index\.json: .*{reason}"):
        model_weights(tmp_path, read_fields(QWEN25_05B), dtype_bytes=2)


@pytest.mark.parametrize("config", [{"model_type": "from_the_future", "hidden_size": 8}, {"hidden_size": 8}])
def test_an_unknown_model_without_files_is_marked_not_guessed(config: dict[str, Any]) -> None:
    weights = model_weights(None, read_fields(config), dtype_bytes=2)
    assert (weights.count, weights.source, weights.exact) == (0, "unknown", False)
    assert any("--weights" in note for note in weights.notes)


def test_a_published_mamba_is_built_without_doubt() -> None:
    """The config has intermediate_size, which the model class ignores, because it computes this size itself."""
    config = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 4, "vocab_size": 100}
    weights = model_weights(None, read_fields(config), dtype_bytes=2)
    assert weights.count > 0
    assert weights.doubt is None
    assert not weights.exact
