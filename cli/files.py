"""Files that a flag names and a command writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsched.engine.errors import LlmschedError


def check_file(flag: str, path: Path) -> None:
    """Raise LlmschedError, before the work and not after it, where no file can be."""
    if path.is_dir() or not path.parent.is_dir():
        raise LlmschedError(f"{flag} {path}: {'is a' if path.is_dir() else 'has no'} directory")


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turns the OSError of a file that cannot be written into a LlmschedError that names it."""
    try:
        yield
    except OSError as problem:
        raise LlmschedError(f"{flag} {path}: {problem.strerror}") from problem
