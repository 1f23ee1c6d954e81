"""Files that a flag names and a command writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsched.engine.errors import LlmschedError


def check_file(flag: str, path: Path, read: Path | None = None) -> None:
    """Raise LlmschedError, before the work and not after it, where no file can be written, or it is the one to `read`.

    What is there stays as it is, and what is not there is not there afterwards.
    """
    if str(path) == "-":
        raise LlmschedError(f"{flag} -: is no file; --json prints the report")
    with writing(flag, path):
        if path.is_dir() or not path.parent.is_dir():
            raise LlmschedError(f"{flag} {path}: {'is a' if path.is_dir() else 'has no'} directory")
        if read is not None and path.resolve() == read.resolve():
            raise LlmschedError(f"{flag} {path}: is the trace that is read; name another file")
        if path.is_fifo():
            return  # to open it would be to wait for a reader
        there = os.path.lexists(path)
        path.open("ab").close()
        if not there:
            path.unlink()


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turns the OSError of a file that cannot be written into a LlmschedError that names it."""
    try:
        yield
    except OSError as problem:
        raise LlmschedError(f"{flag} {path}: {problem.strerror}") from problem
