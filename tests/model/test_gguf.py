"""GGUF files give the logits, the configuration and the token ids of the model that they were made from."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import CASES, write_gguf
from tiny_models import VOCAB_SIZE, build_model, build_tokenizer

from llmsched.engine.errors import ModelError
from llmsched.engine.model.gguf_file import read_gguf
from llmsched.engine.model.gguf_weights import gguf_state_dict
from llmsched.engine.model.loader import load_config, load_info, load_model, load_tokenizer
from llmsched.engine.model.source import locate

IDS = torch.arange(5, 45)[None]


def logits_of(path: Path) -> torch.Tensor:
    source = locate(str(path))
    config = load_config(source)
    model = load_model(source, config, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_original(case: str, tmp_path: Path) -> None:
    name, arch, overrides = CASES[case]
    model = build_model(name, **overrides)
    model.set_attn_implementation("eager")
    path = write_gguf(tmp_path / "tiny.gguf", model, build_tokenizer(), arch=arch)
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(path), model(IDS).logits, rtol=0, atol=1e-5)


ROPE = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling_is_read(kind: str, tmp_path: Path) -> None:
    rope = ROPE[kind]
    metadata = {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 4.0}
    if kind == "yarn":
        metadata["qwen2.rope.scaling.original_context_length"] = 128
    model = build_model("qwen2", rope_parameters=rope)
    path = write_gguf(tmp_path / "tiny.gguf", model, build_tokenizer(), arch="qwen2", metadata=metadata)
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(path), model(IDS).logits, rtol=0, atol=1e-5)


def test_llama3_rope_is_recognised_in_its_table(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = build_model("llama", rope_parameters=rope, head_dim=64, max_position_embeddings=131072)
    plain = build_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, head_dim=64)
    divisors = (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy()
    table = {"rope_freqs.weight": divisors}
    path = write_gguf(tmp_path / "tiny.gguf", model, build_tokenizer(), arch="llama", tensors=table)
    config = load_config(locate(str(path)))
    assert {key: config.rope_parameters[key] for key in rope} == rope
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(path), model(IDS).logits, rtol=0, atol=1e-5)


def test_other_rope_tables_are_refused(tmp_path: Path) -> None:
    table = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", build_model("llama"), build_tokenizer(), arch="llama", tensors=table)
    with pytest.raises(ModelError, match="rope_freqs"):
        load_config(locate(str(path)))


def test_longrope_limits_the_context_to_the_original(tmp_path: Path) -> None:
    factors = {
        f"rope_factors_{kind}.weight": np.full(8, value, np.float32) for kind, value in (("long", 4), ("short", 1.5))
    }
    model = build_model("phi3")
    metadata = {"phi3.rope.scaling.original_context_length": 128, "phi3.rope.scaling.attn_factor": 1.19}
    path = write_gguf(tmp_path / "tiny.gguf", model, build_tokenizer(), arch="phi3", metadata=metadata, tensors=factors)
    source = locate(str(path))
    config = load_config(source)
    assert config.rope_parameters["short_factor"] == [1.5] * 8
    assert load_info(source, config, load_tokenizer(source)).max_position == 128
    assert not torch.allclose(logits_of(path), model(IDS).logits, atol=1e-3)


@pytest.mark.parametrize("scheme", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_matrices_are_read_as_gguf_defines_them(scheme: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[scheme]
    model = build_model("qwen2")
    path = write_gguf(tmp_path / "tiny.gguf", model, build_tokenizer(), arch="qwen2", quantisation=kind)
    state = gguf_state_dict(read_gguf(path))
    name = "model.layers.1.mlp.down_proj.weight"
    original = model.state_dict()[name]
    expected = gguf.dequantize(gguf.quantize(original.numpy(), kind), kind)
    assert state[name][...].dtype == torch.float32
    np.testing.assert_array_equal(state[name][...].numpy(), expected)
    assert float((state[name][...] - original).abs().max()) < 0.1


def test_float32_metadata_is_the_decimal_that_was_meant(tmp_path: Path) -> None:
    model = build_model("llama", rms_norm_eps=1e-5)
    path = write_gguf(tmp_path / "tiny.gguf", model, build_tokenizer(), arch="llama")
    assert load_config(locate(str(path))).rms_norm_eps == 1e-5


def test_end_of_turn_joins_end_of_sequence(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    path = write_gguf(
        tmp_path / "tiny.gguf",
        build_model("llama"),
        tokenizer,
        arch="llama",
        metadata={"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 2},
    )
    source = locate(str(path))
    info = load_info(source, load_config(source), load_tokenizer(source))
    assert info.eos_token_ids == {2, 3}
    assert info.name == "tiny"
    assert info.vocab_size == VOCAB_SIZE


REFUSED = {
    "unknown architecture": ({"general.architecture": "mamba"}, r"'mamba' is not supported; supported: llama, qwen2"),
    "experts": ({"llama.expert_count": 8}, "lacks llama.expert_used_count"),
    "no shape": ({"llama.block_count": None}, "lacks llama.block_count"),
    "unknown scaling": ({"llama.rope.scaling.type": "su"}, "rope scaling 'su' is not supported"),
    "unknown scaling setting": ({"llama.rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor"),
    "split": ({"split.count": 2}, "--merge"),
    "wrong type": ({"llama.block_count": "many"}, "num_hidden_layers"),
    "no such token": ({"tokenizer.ggml.eos_token_id": None, "llama.attention.head_count": "x"}, "cannot be read"),
    "different value width": ({"llama.attention.value_length": 8}, "values of 8 dimensions"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    metadata, message = REFUSED[case]
    path = write_gguf(tmp_path / "t.gguf", build_model("llama"), build_tokenizer(), arch="llama", metadata=metadata)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(locate(str(path)))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write_gguf(tmp_path / "t.gguf", build_model("llama"), build_tokenizer(), arch="llama", tensors=extra)
    with pytest.raises(ModelError, match=r"attn_sinks"):
        logits_of(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "t.gguf", build_model("llama"), build_tokenizer(), arch="llama").read_bytes()
    for name, content in {"cut": whole[:-20000], "header": whole[:100], "text": b"not a model", "empty": b""}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=str(path)) as caught:
            logits_of(path)
        assert "\n" not in str(caught.value)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    for layers in (1, 2):
        write_gguf(path, build_model("llama", num_hidden_layers=layers), build_tokenizer(), arch="llama")
        assert load_config(locate(str(path))).num_hidden_layers == layers


def test_no_damage_to_the_header_raises_anything_else(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "t.gguf", build_model("llama"), build_tokenizer(), arch="llama").read_bytes()
    header = whole.index(b"blk.0.attn_norm.weight") + 100
    rng, refusals = random.Random(0), []
    for attempt in range(150):
        content = bytearray(whole)
        for _ in range(3):
            content[rng.randrange(header)] = rng.randrange(256)
        path = tmp_path / f"{attempt}.gguf"
        path.write_bytes(content)
        try:
            source = locate(str(path))
            load_info(source, load_config(source), load_tokenizer(source))
        except ModelError as error:
            refusals.append(str(error))
        path.unlink()
    assert len(refusals) > 10
    assert not any("\n" in refusal for refusal in refusals)
