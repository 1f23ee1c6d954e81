"""Text part of multimodal checkpoints: it is served and planned as a text model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MULTIMODAL, build_model, build_multimodal, build_tokenizer

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import device_memory
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.model.loader import open_model
from llmsched.engine.model.support import refusal


def save(model: Any, path: Path) -> EngineConfig:
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return EngineConfig(model=str(path), device="cpu", dtype="float32", max_model_len=64, kv_cache_memory_bytes=1 << 20)


def with_names_of_gemma_3n(path: Path) -> None:
    """Rename the tensors of a text model to those of Gemma 3n, and add two that are for images and sound."""
    state = load_file(path / "model.safetensors")
    state = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in state.items()}
    state |= {f"model.{part}.weight": torch.ones(64, 64) for part in ("vision_tower.stem", "embed_audio.embedding")}
    save_file(state, path / "model.safetensors", {"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    whole = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (path / "config.json").write_text(json.dumps({**whole, "eos_token_id": [2, 7]}))


@pytest.mark.parametrize("model_type", [*MULTIMODAL, "gemma3n"])
def test_the_text_part_is_served_as_planned(model_type: str, tmp_path: Path) -> None:
    whole = build_model("gemma3n") if model_type == "gemma3n" else build_multimodal(model_type)
    config = save(whole, tmp_path)
    if model_type == "gemma3n":
        with_names_of_gemma_3n(tmp_path)
    opened = open_model(config)
    assert opened.info.eos_token_ids == ({2, 7} if model_type == "gemma3n" else {2})
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        found, expected = opened.load()(input_ids=ids).logits, whole(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    planner = open_planner(config.model)
    assert refusal(planner.content) is None
    plan = planner.plan(config, device_memory("cpu"))
    assert any("are for images and sound and are not loaded" in note for note in plan.notes)
    engine = build_engine(config)
    assert engine.plan is not None
    assert engine.plan.measured is not None
    assert plan.weights_bytes == pytest.approx(engine.plan.measured.weights, rel=0.02)
    from_config = open_planner(str(tmp_path / "config.json")).plan(config, device_memory("cpu"))
    assert from_config.weights_bytes == pytest.approx(plan.weights_bytes, rel=0.02)
