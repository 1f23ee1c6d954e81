"""Answers of transformers about a config are kept, so that it is asked only once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmsched.engine.architecture import config_fields as module
from llmsched.engine.architecture.config_fields import ConfigCache
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ModelError
from llmsched.engine.memory.planner import ModelPlanner

#: A family that is not in the table, so that transformers must be asked.
BLOOM = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 64, "vocab_size": 128}
GPU = DeviceMemory("cuda", "GPU", 24 << 30)


def plan(content: dict[str, Any], directory: Path) -> Any:
    return ModelPlanner(content, cache=ConfigCache(content, directory)).plan(EngineConfig(max_model_len=64), GPU)


def test_the_second_plan_does_not_ask_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan(BLOOM, tmp_path / "deep")
    assert len(list((tmp_path / "deep").iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr("llmsched.engine.architecture.config_fields.transformers_config", pytest.fail)
        patch.setattr("llmsched.engine.architecture.weights._built_modules", pytest.fail)
        assert plan(BLOOM, tmp_path / "deep") == first
    assert first == ModelPlanner(BLOOM).plan(EngineConfig(max_model_len=64), GPU)


def test_another_config_or_version_is_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get(content: dict[str, Any]) -> Any:
        return ConfigCache(content, tmp_path).get("x", lambda: asked.append("x") or len(asked))

    assert [get({"a": 1}), get({"a": 1}), get({"a": 2})] == [1, 1, 2]
    monkeypatch.setattr(module, "version", lambda name: "another")
    assert get({"a": 1}) == 3


def test_errors_are_not_kept(tmp_path: Path) -> None:
    cache = ConfigCache({}, tmp_path)

    def refuse() -> None:
        raise ModelError("no")

    for _ in range(2):
        with pytest.raises(ModelError):
            cache.get("x", refuse)
    assert cache.get("x", lambda: None) is None
    assert ConfigCache({}, tmp_path).get("x", pytest.fail) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"'])
def test_a_damaged_entry_is_ignored(tmp_path: Path, text: str) -> None:
    ConfigCache({}, tmp_path).get("x", lambda: 1)
    [entry] = tmp_path.iterdir()
    entry.write_text(text)
    assert ConfigCache({}, tmp_path).get("x", lambda: 2) == 2


def test_a_directory_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ConfigCache({}, tmp_path / "file")
    assert cache.get("x", lambda: 1) == 1
    assert cache.get("y", lambda: {1, 2}) == {1, 2}, "a value that is not JSON is not kept"
