"""Fixtures that every part's tests may use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import settings

# The same examples in each run, and as much time for each as a busy machine takes.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


class TinyModel(Protocol):
    """tiny_model("qwen3", seed=1, head_dim=16) -> directory; the same arguments give the same directory."""

    def __call__(self, arch: str, **overrides: Any) -> Path: ...


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Factory of small random-weight models on disk, each written once a session: treat them as read-only.

    Architectures: tiny_models.ARCHITECTURES. Keywords: `seed`, `bos`, `chat_template`, `max_shard_size`, and any field
    of the model's config.
    """
    from tiny_models import save_tiny_model

    made: dict[str, Path] = {}

    def make(arch: str, **overrides: Any) -> Path:
        key = f"{arch} {json.dumps(overrides, sort_keys=True)}"
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(f"tiny-{arch}"), arch, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model as a Hugging Face directory (fetched and converted the first time, then from the user's cache)."""
    from llmsched.engine.model.source import locate

    return locate("demo").path
