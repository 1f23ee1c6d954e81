"""A model's name leads to files on disk or to one line that says why not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.model.loader import load_config
from llmsched.engine.model.source import locate


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the hub's cache directory, empty, with the hub out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_directory(tiny_model: Any) -> None:
    path = tiny_model("llama")
    source = locate(str(path))
    assert (source.kind, source.name, source.path) == ("directory", path.name, path)


def test_the_current_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert locate(".").name == "my-model"


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "some-model.Q8_0.gguf"
    path.write_bytes(b"GGUF")
    source = locate(str(path))
    assert (source.kind, source.name, source.path) == ("gguf", "some-model.Q8_0", path)


def test_a_hub_model_in_the_cache_needs_no_hub(offline_hub: Path, tiny_model: Any) -> None:
    repository = offline_hub / "models--acme--tiny"
    shutil.copytree(tiny_model("llama"), repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123", encoding="utf-8")
    source = locate("acme/tiny")
    assert (source.kind, source.name) == ("directory", "acme/tiny")
    assert load_config(source).model_type == "llama"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acme/absent", "the hub cannot be reached.*give a local directory"),
        ("absent", "the hub cannot be reached"),
        ("/no/such/directory", "not a hub id"),
        ("two words", "not a hub id"),
        ("", "the name is empty"),
        ("absent.gguf", "no such file"),
    ],
)
def test_a_missing_model_is_refused_in_one_line(spec: str, message: str, offline_hub: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        locate(spec)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"model {spec}".strip())


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="another kind of file"):
        locate(str(path))


def test_long_errors_become_one_line() -> None:
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 5000))) < 310
