"""Configs shipped with llmsched: at least the 30 most served models, planned as by the files on the hub, without it."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from llmsched.engine.architecture.config_fields import read_config_file
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.memory.plan import MemoryPlan
from llmsched.engine.memory.planner import SHIPPED, ModelPlanner, open_planner
from llmsched.profiles.shipped_models import shipped_configs

PUBLISHED = Path(__file__).parent.parent / "data" / "model_configs"
HUB_NAMES = {path.name.removesuffix("_config.json").replace("--", "/"): path for path in PUBLISHED.iterdir()}
GPU = DeviceMemory("cuda", "GPU", 1 << 40)


def plan(planner: ModelPlanner) -> MemoryPlan:
    return planner.plan(EngineConfig(), GPU)


def test_there_are_enough() -> None:
    assert len({json.dumps(config) for config in shipped_configs().values()}) >= 30


@pytest.mark.parametrize("name", sorted(shipped_configs().keys() & HUB_NAMES.keys()))
def test_the_plan_is_that_of_the_published_config(name: str) -> None:
    assert plan(ModelPlanner(shipped_configs()[name])) == plan(ModelPlanner(read_config_file(HUB_NAMES[name])))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.54),
        ("Qwen/Qwen2.5-3B-Instruct", 3.09),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.24),
        ("meta-llama/Llama-3.2-3B-Instruct", 3.21),
        ("microsoft/phi-4", 14.66),
        ("microsoft/Phi-4-mini-instruct", 3.84),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7.25),
    ],
)
def test_parameters_are_those_of_the_model_card(name: str, billions: float) -> None:
    assert plan(ModelPlanner(shipped_configs()[name])).weights_bytes / 2e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize("name", shipped_configs())
def test_every_model_is_planned_without_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    planner = open_planner(name)
    assert planner.origin == SHIPPED
    assert plan(planner).num_blocks > 0


def test_a_cached_config_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--Qwen--Qwen3-8B"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    (snapshot / "config.json").write_text(json.dumps({**shipped_configs()["Qwen/Qwen3-8B"], "num_hidden_layers": 2}))
    planner = open_planner("Qwen/Qwen3-8B")
    assert planner.origin == str(snapshot)
    assert plan(planner).kv_bytes_per_token == 2 * 2 * 8 * 128 * 2
