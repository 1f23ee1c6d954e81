"""Files that flags name: refused before the work where they cannot be written, and not touched where they can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmsched.cli.files import check_file
from llmsched.engine.errors import LlmschedError


def test_what_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("content")
    check_file("--save", there)
    check_file("--save", tmp_path / "new")
    assert there.read_text() == "content"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    check_file("--save", tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is a directory"),
        ("nowhere/file", "has no directory"),
        ("x" * 300, "File name too long"),
        ("loop", "symbolic links"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(LlmschedError, match=f"^--save .*{message}"):
        check_file("--save", tmp_path / name)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be allowed everything."""

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LlmschedError, match="Permission denied"):
        check_file("--save", tmp_path / "new")


def test_a_dash_is_no_file() -> None:
    with pytest.raises(LlmschedError, match="--save -: is no file; --json prints the report"):
        check_file("--save", Path("-"))


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    with pytest.raises(LlmschedError, match="is the trace that is read"):
        check_file("--save", tmp_path / "." / "trace.jsonl", trace)
