"""`llmsched` as it is typed, without the keys that the environment may hold."""

from __future__ import annotations

import pytest
from command_line import CommandLine


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    for name in ("LLMSCHED_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return CommandLine(monkeypatch, capsys)
