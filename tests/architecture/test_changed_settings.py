"""Configs with one setting deleted or renamed: figures that changed are never called exact, and no error is raw."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmsched.engine.architecture.config_fields import read_config_file
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import LlmschedError
from llmsched.engine.memory.planner import ModelPlanner
from llmsched.engine.model.support import refusal

CONFIGS = sorted((Path(__file__).parent.parent / "data" / "model_configs").glob("*.json"))
GPU = DeviceMemory("cuda", "a large GPU", 4 << 40)

Where = tuple[str | int, ...]


class Figures(NamedTuple):
    """Bytes of KV and of everything else that the plan of a config states, and their labels."""

    kv: tuple[Any, ...]
    rest: tuple[Any, ...]
    kv_confidence: str
    confidence: str


def planned(config: Mapping[str, Any], name: str) -> Figures:
    planner = ModelPlanner(config, name=name)
    plan, shape = planner.plan(EngineConfig(), GPU), planner.shape(EngineConfig(), GPU)
    refusal(config)
    kv = (plan.kv_bytes_per_token, plan.kv_bytes_per_token_window, plan.window, plan.state_bytes_per_seq)
    rest = (plan.weights_bytes, plan.activation_bytes, plan.max_position)
    return Figures((*kv, plan.block_bytes), rest, shape.geometry.confidence, plan.confidence)


def settings(value: Any, where: Where = ()) -> Iterator[Where]:
    """Yield the place of every setting, also of those in nested configs and in the first of a list of configs."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*where, name)
            yield from settings(inner, (*where, name))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from settings(value[0], (*where, 0))


def changed(config: dict[str, Any], where: Where, prefix: str | None) -> dict[str, Any]:
    """Return a copy in which the setting has `prefix` before its name, or is deleted if that is None."""
    copied = inner = copy.deepcopy(config)
    for place in where[:-1]:
        inner = inner[place]  # type: ignore[index]
    value = inner.pop(where[-1])  # type: ignore[arg-type]
    if prefix is not None:
        inner[f"{prefix}{where[-1]}"] = value
    return copied


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name.split("_")[0])
def test_no_changed_setting_makes_a_wrong_figure_exact(file: Path) -> None:
    config, name = read_config_file(file), file.stem
    truth = planned(config, name)
    ways = [(where, prefix) for where in settings(config) for prefix in (None, "my_")]
    for where, prefix in ways:
        try:
            found = planned(changed(config, where, prefix), name)
        except LlmschedError:  # the command line prints it in one line
            continue
        assert found.kv == truth.kv or found.kv_confidence == "estimate", (where, prefix)
        assert found.rest == truth.rest or found.confidence == "estimate", (where, prefix)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", ["num_key_value_heads", "tie_word_embeddings", "vocab_size"]),
        ("Qwen--Qwen3-30B-A3B", ["head_dim", "moe_intermediate_size", "decoder_sparse_step"]),
        ("google--gemma-4-26B-A4B", ["text_config.num_global_key_value_heads", "text_config.sliding_window"]),
        ("Qwen--Qwen3-VL-4B-Instruct", ["vision_config", "vision_config.depth", "text_config"]),
        (
            "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            ["moe_shared_expert_intermediate_size", "hybrid_override_pattern"],
        ),
        ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", ["block_configs", "model_type"]),
        ("nvidia--Gemma-4-31B-IT-NVFP4", ["quantization_config", "quantization_config.kv_cache_scheme"]),
    ],
)
@pytest.mark.parametrize("prefix", [None, "x_"])
def test_the_settings_that_matter_most(config: str, names: list[str], prefix: str | None) -> None:
    content = read_config_file(CONFIGS[0].with_name(f"{config}_config.json"))
    for name in names:
        try:
            found = planned(changed(content, tuple(name.split(".")), prefix), config)
        except LlmschedError:
            continue
        assert found.confidence == "estimate", name
