"""Output files: checked before the work, without changing them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import CommandLine

from llmsched.cli.output_files import check_file
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.toml_files import ProfileError, check_writable
from llmsched.profiles.tuned import TunedProfile, save_profile


def test_a_writable_file_is_not_changed(tmp_path: Path) -> None:
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
def test_files_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(LlmschedError, match=f"^--save .*{message}"):
        check_file("--save", tmp_path / name)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, so the error is simulated."""

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LlmschedError, match="Permission denied"):
        check_file("--save", tmp_path / "new")


def test_a_dash_is_not_a_file() -> None:
    with pytest.raises(LlmschedError, match="--save -: is not a file; --json prints the report"):
        check_file("--save", Path("-"))


def test_the_input_file_is_not_overwritten(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    with pytest.raises(LlmschedError, match="is an input file"):
        check_file("--save", tmp_path / "." / "trace.jsonl", trace)


@pytest.mark.parametrize(
    "arguments",
    [
        ("workload", "/dev/full"),
        ("bench", "m", "--trace", "/dev/full"),
        ("kv-budget", "m", "--lengths", "/dev/full"),
        ("serve", "m", "--pin-prefix", "/dev/full"),
        ("serve", "m", "--profile", "/dev/full"),
        ("explain", "1", "--file", "/dev/full"),
        ("profiles", "show", "/dev/full"),
    ],
)
def test_a_device_is_not_read(command: CommandLine, arguments: tuple[str, ...]) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no device without an end")
    error = command.refused(*arguments)
    assert "/dev/full" in error
    assert "is a device, not a file" in error or "is not a regular file" in error


def test_a_device_is_not_replaced_by_a_profile(tmp_path: Path) -> None:
    """A named pipe stands in for a device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (lambda: check_writable(pipe), lambda: save_profile(TunedProfile(engine={}), str(pipe))):
        with pytest.raises(ProfileError, match="is not a regular file"):
            write()
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "arguments", [("kv-budget", "FILE", "--gpu", "h100"), ("explain", "1", "--file", "FILE"), ("workload", "FILE")]
)
def test_json_that_is_nested_too_deeply(command: CommandLine, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert "deep.json" in command.refused(*(str(deep) if word == "FILE" else word for word in arguments))
