"""Fixtures for the tests of all packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import settings

# Hypothesis tries the same examples in each run, without a deadline, because a busy machine may be slow.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


class TinyModel(Protocol):
    """Type of the fixture `tiny_model`, for calls such as tiny_model("qwen3", seed=1, head_dim=16)."""

    def __call__(self, arch: str, **overrides: Any) -> Path: ...


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return a function that writes a small model with random weights and returns its directory.

    Calls with equal arguments return the same directory for the whole session, so treat it as read-only. `arch` is a
    key of tiny_models.ARCHITECTURES. Keywords are `seed`, `bos`, `chat_template`, `max_shard_size`, and any field of
    the model's config.
    """
    from tiny_models import save_tiny_model

    made: dict[str, Path] = {}

    def make(arch: str, **overrides: Any) -> Path:
        key = f"{arch} {json.dumps(overrides, sort_keys=True)}"
        if key not in made:
            made[key] = save_tiny_model(tmp_path_factory.mktemp(f"tiny-{arch}"), arch, **overrides)
        return made[key]

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limit torch to one thread. More threads make small models no faster, and much slower on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """Return the directory of the demo model, which is fetched and converted unless the user's cache has it."""
    from llmsched.engine.model.source import locate

    return locate("demo").path
