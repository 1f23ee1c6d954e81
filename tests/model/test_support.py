"""Models that cannot be served are refused by their config, with the name found and what is supported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import ARCHITECTURES, build_config, build_model
from tiny_models import RECURRENT as RECURRENT_MODELS

from llmsched.engine.errors import ModelError
from llmsched.engine.model.loader import load_config
from llmsched.engine.model.source import locate
from llmsched.engine.model.support import _INDEXED, DECODERS, RECURRENT, check_supported, refusal_of_file

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def write_config(directory: Path, config: dict[str, Any]) -> str:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


def quantised(method: str, **settings: Any) -> dict[str, Any]:
    return {**LLAMA, "quantization_config": {"quant_method": method, **settings}}


def compressed(**group: Any) -> dict[str, Any]:
    return quantised("compressed-tensors", config_groups={"group_0": {"targets": ["Linear"], **group}})


#: config.json, and what the refusal must say.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"model_type": "foo", "architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
    "unknown class": ({**LLAMA, "architectures": ["FooForCausalLM"]}, "FooForCausalLM.*supported: LlamaForCausalLM"),
    "no class": ({"model_type": "llama"}, "names no architectures.*supported: LlamaForCausalLM"),
    "empty list": ({**LLAMA, "architectures": []}, "names no architectures"),
    "no type": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "classifier": ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "encoder": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
    "encoder as decoder": ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "BertLMHeadModel.*encoder"),
    "encoder-decoder": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5.*encoder"),
    "vision": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        "Gemma3ForConditionalGeneration.*more than text",
    ),
    "text part": (
        {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
        "Qwen2_5_VLForConditionalGeneration.*more than text",
    ),
    "hqq": (quantised("hqq"), r"quantised \(hqq: not supported\); supported: unquantised weights, fp8, AWQ"),
    "gptq of 3 bits": (quantised("gptq", bits=3), r"quantised \(gptq: 3 bits\)"),
    "gptq of 2 bits in a module": (quantised("gptq", bits=4, dynamic={"+:up": {"bits": 2}}), r"\(gptq: 2 bits\)"),
    "gptq for Marlin": (quantised("gptq", bits=4, checkpoint_format="marlin"), r"\(gptq: layout marlin\)"),
    "awq of 8 bits": (quantised("awq", bits=8), r"\(awq: 8 bits\)"),
    "awq gemv": (quantised("awq", bits=4, version="gemv"), r"\(awq: layout gemv\)"),
    "no method": ({**LLAMA, "quantization_config": {"mode": 4}}, r"quantised \(unknown: not supported\)"),
    "no list": (quantised("gptq", bits=4, dynamic=[1]), r"\(gptq: the settings are not in the form of this method"),
    "bitsandbytes as floats": (
        quantised("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_storage="bfloat16"),
        r"\(bitsandbytes: codes are stored as bfloat16\)",
    ),
    "int3": (compressed(weights={"num_bits": 3}), "weights of type int with 3 bits"),
    "fp6": (compressed(weights={"num_bits": 6, "type": "float"}), "weights of type float with 6 bits"),
    "marlin": (compressed(weights={"num_bits": 4}, format="marlin-24"), "layout marlin-24"),
    "sparse": (quantised("compressed-tensors", sparsity_config={"format": "sparse-24-bitmask"}), "weights are sparse"),
    "rotated": (quantised("compressed-tensors", transform_config={"config_groups": {}, "a": 1}), "it rotates inputs"),
    "no groups": (quantised("compressed-tensors"), "no config_groups"),
    "modelopt": (quantised("modelopt", quant_algo="W4A8_AWQ"), r"\(modelopt W4A8_AWQ: quant_algo W4A8_AWQ\)"),
    "own attention": ({"model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"]}, "attention interface"),
    "recurrent": ({"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM.*recurrent"),
    "hybrid": ({"model_type": "zamba", "architectures": ["ZambaForCausalLM"]}, "ZambaForCausalLM.*recurrent"),
    "chunks": ({"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}, "chunked_attention"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_before_weights_are_looked_for(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    spec = write_config(tmp_path, config)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(locate(spec))
    assert "\n" not in str(caught.value)
    assert spec in str(caught.value)
    decided, reason = refusal_of_file(config)
    assert decided == (reason is not None)
    assert reason is None or re.search(message, reason), "the file alone never says otherwise"


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *RECURRENT_MODELS])
def test_configuration_alone_is_enough(arch: str, tmp_path: Path) -> None:
    config = build_config(arch)
    config.architectures = [type(build_model(arch)).__name__]
    config.save_pretrained(tmp_path)
    loaded = load_config(locate(str(tmp_path)))
    assert loaded.model_type == config.model_type
    check_supported(loaded, "tiny")


def test_damaged_configurations_are_named(tmp_path: Path) -> None:
    for content, message in {"{": "cannot be read as JSON", "[]": "not a JSON object"}.items():
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ModelError, match=message):
            load_config(locate(str(tmp_path)))


def test_directory_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; expected a Hugging Face"):
        load_config(locate(str(tmp_path)))
    (tmp_path / "m.Q8_0.gguf").touch()
    with pytest.raises(ModelError, match=r"has no config\.json; name a file in it, e\.g\. m\.Q8_0\.gguf"):
        load_config(locate(str(tmp_path)))


def test_impossible_values_are_named(tmp_path: Path) -> None:
    spec = write_config(tmp_path, {**LLAMA, "num_hidden_layers": "many"})
    with pytest.raises(ModelError, match="num_hidden_layers"):
        load_config(locate(spec))


def test_code_from_the_directory_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_foo.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")
    auto_map = {"AutoConfig": "configuration_foo.FooConfig"}
    spec = write_config(tmp_path, {"model_type": "foo", "architectures": ["Foo"], "auto_map": auto_map})
    with pytest.raises(ModelError):
        load_config(locate(spec))


@pytest.mark.parametrize("model_type", sorted(DECODERS | RECURRENT | _INDEXED))
def test_config_json_and_model_class_agree(model_type: str) -> None:
    from transformers import AutoConfig

    name = (DECODERS | RECURRENT | _INDEXED)[model_type]
    config = AutoConfig.for_model(model_type, architectures=[name])
    content = {"model_type": model_type, "architectures": [name]}
    if model_type in DECODERS | RECURRENT:
        check_supported(config, "m")
        assert refusal_of_file(content) == (True, None)
        return
    with pytest.raises(ModelError) as asked:
        check_supported(config, "m")
    assert f"model m: {refusal_of_file(content)[1]}" == str(asked.value)


def test_config_json_shows_vision_and_layer_types() -> None:
    nested = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": {}}
    assert "more than text" in str(refusal_of_file(nested))
    assert "layers of type linear_attention" in str(refusal_of_file({**LLAMA, "layer_types": ["linear_attention"]}))


def test_quantised_weights_that_only_the_file_beside_the_config_names_are_refused(tmp_path: Path) -> None:
    model = write_config(tmp_path, LLAMA)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "INT4_AWQ"}}))
    with pytest.raises(ModelError, match=r"its weights are quantised \(modelopt INT4_AWQ: quant_algo INT4_AWQ\)"):
        load_config(locate(model))


def test_mpt_is_served_under_the_name_that_its_authors_gave_the_class(tmp_path: Path) -> None:
    config = {"model_type": "mpt", "architectures": ["MPTForCausalLM"]}
    assert refusal_of_file(config) == (True, None)
    load_config(locate(write_config(tmp_path, config)))
