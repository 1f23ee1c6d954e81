"""Adapters on disk: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import ATTENTION, MLP, save_adapter
from safetensors.torch import load_file
from tiny_models import build_model

from llmsched.engine.architecture.adapter_files import AdapterFiles, adapter_sizes, read_adapters
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError, ModelError

QUERY = "model.layers.1.self_attn.q_proj"


def read(directory: Path, name: str = "a") -> AdapterFiles:
    (adapter,) = read_adapters((f"{name}={directory}",))
    return adapter


def test_shapes_and_scales(tmp_path: Path) -> None:
    model = build_model("llama")
    adapter = read(save_adapter(tmp_path / "plain", model, ATTENTION, rank=4, alpha=6))
    assert len(adapter.pairs) == 3 * 4
    assert adapter.pairs[QUERY][2:] == (4, 64, 64, 1.5)
    assert adapter.pairs[QUERY.replace("q_proj", "k_proj")][2:5] == (4, 64, 32)
    assert (adapter.rank, adapter.base) == (4, "tiny")
    assert read(save_adapter(tmp_path / "rs", model, ATTENTION, alpha=6, use_rslora=True)).pairs[QUERY].scale == 3
    by_pattern = {"alpha_pattern": {"k_proj": 9, "layers.1.self_attn.q_proj": 10, "j_proj": 1}}
    adapter = read(save_adapter(tmp_path / "patterns", model, ATTENTION, alpha=6, **by_pattern))
    scales = [
        adapter.pairs[f"model.layers.{name}_proj"].scale for name in ("1.self_attn.q", "0.self_attn.q", "1.self_attn.k")
    ]
    assert scales == [2.5, 1.5, 2.25]


@pytest.mark.parametrize(
    "targets", ["all-linear", r".*\.(self_attn|mlp)\..*_proj", ["up_proj", QUERY, "layers.0.mlp.down_proj"]]
)
def test_forms_of_target_modules(tmp_path: Path, targets: Any) -> None:
    tensors = {
        f"base_model.model.{module}.lora_{matrix}.weight": torch.zeros(shape)
        for module, outputs, inputs in ((QUERY, 64, 64), ("model.layers.0.mlp.down_proj", 64, 96))
        for matrix, shape in (("A", (4, inputs)), ("B", (outputs, 4)))
    }
    directory = save_adapter(tmp_path, build_model("llama"), (), tensors=tensors, target_modules=targets)
    assert read(directory).pairs.keys() == {QUERY, "model.layers.0.mlp.down_proj"}


def test_memory_counts_the_padded_rank_for_every_module_that_is_adapted(tmp_path: Path) -> None:
    model = build_model("llama")
    one = save_adapter(tmp_path / "one", model, ("q_proj",), rank=2)
    two = save_adapter(tmp_path / "two", model, ("q_proj", "down_proj"), rank=8)
    adapters = read_adapters((f"one={one}", f"two={two}"))
    assert adapter_sizes(adapters).num_bytes(2) == 2 * 8 * 3 * ((64 + 64) + (96 + 64)) * 2
    assert adapter_sizes(()).num_bytes(2) == 0


#: Name -> (changes to the config, what the error says).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "DoRA": ({"use_dora": True}, "use_dora"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    "new tokens": ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    "experts": ({"target_parameters": ["experts.up"]}, "target_parameters"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    "no rank": ({"r": 0}, "r is 0"),
    "alpha is no number": ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
    "no modules": ({"target_modules": []}, "target_modules"),
    "a bad pattern": ({"target_modules": "(q_proj"}, "no valid pattern"),
    "patterns without values": ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\]"),
    "a pattern's alpha is no number": ({"alpha_pattern": {"q_proj": "9"}}, "alpha_pattern is {'q_proj': '9'}"),
    "another rank": ({"r": 3}, "ranks 4 and 4; adapter_config.json says 3"),
    "modules that are not named": ({"target_modules": ["k_proj"]}, "q_proj, which target_modules does not name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[case]
    directory = save_adapter(tmp_path / case, build_model("llama"), ("q_proj",), **changes)
    with pytest.raises(ModelError, match=rf"adapter sql: .*{reason}"):
        read(directory, "sql")


def test_files_that_are_missing_or_incomplete(tmp_path: Path) -> None:
    model = build_model("llama")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        read(tmp_path / "empty")
    pickled = save_adapter(tmp_path / "pickled", model, ("q_proj",))
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors; save it as safetensors"):
        read(pickled)
    magnitude = {f"base_model.model.{QUERY}.lora_magnitude_vector": torch.ones(64)}
    with pytest.raises(ModelError, match=r"only pairs of lora_A and lora_B are supported, not .*magnitude"):
        read(save_adapter(tmp_path / "other", model, ("q_proj",), tensors=magnitude))
    half = {f"base_model.model.{QUERY}.lora_A.weight": torch.ones(4, 64)}
    with pytest.raises(ModelError, match="not the other matrix"):
        read(save_adapter(tmp_path / "half", model, ("k_proj",), tensors=half))
    integers = {name: tensor.int() for name, tensor in load_file(tmp_path / "half/adapter_model.safetensors").items()}
    with pytest.raises(ModelError, match="type I32"):
        read(save_adapter(tmp_path / "integers", model, (), tensors=integers, target_modules=["q_proj"]))
    cut = save_adapter(tmp_path / "cut", model, MLP)
    whole = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(whole[:100])
    with pytest.raises(ModelError, match="cut short"):
        read(cut)
    damaged = save_adapter(tmp_path / "damaged", model, MLP)
    (damaged / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelError, match="not a JSON object"):
        read(damaged)


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        (("sql",), "'sql' is not NAME=DIR"),
        (("=/tmp",), "is not NAME=DIR"),
        (("sql=",), "is not NAME=DIR"),
        (("sql=/no/such/place",), "there is no directory /no/such/place"),
        (("sql=/", "sql=/"), "two adapters have the name 'sql'"),
    ],
)
def test_bad_settings(lora: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(lora=lora)
