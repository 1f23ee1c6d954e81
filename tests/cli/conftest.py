"""Fixtures that run `llmsched` as a user types it, without the API keys and profiles of this machine's user."""

from __future__ import annotations

import gc
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import CommandLine, Terminal
from rich.console import Console

from llmsched.cli import render


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection before each load, which takes far longer than the loads of these tests."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("LLMSCHED_PROFILES", str(tmp_path / "profiles"))
    for name in ("LLMSCHED_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def client_key(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make "k" the key that commands send to a server."""
    monkeypatch.setenv("LLMSCHED_API_KEY", "k")


@pytest.fixture
def new_config_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("llmsched.engine.memory.planner.cache_directory", lambda: cache)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    def make(width: int | None) -> Callable[[], str]:
        written = io.StringIO()
        console = Console(file=written, force_terminal=width is not None, width=width or 10_000, color_system=None)
        monkeypatch.setattr(render, "stdout", lambda: console)
        monkeypatch.setattr(render, "stderr", lambda: console)
        return lambda: re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())

    return make
