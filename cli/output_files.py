from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsched.engine.errors import LlmschedError


def check_file(flag: str, path: Path, read: Path | None = None) -> None:
    """Raise LlmschedError if the file cannot be written or is the input file `read`. Leaves the file unchanged."""
    if str(path) == "-":
        raise LlmschedError(f"{flag} -: is not a file; --json prints the report")
    with writing(flag, path):
        if path.is_dir() or not path.parent.is_dir():
            raise LlmschedError(f"{flag} {path}: {'is a' if path.is_dir() else 'has no'} directory")
        if read is not None and path.resolve() == read.resolve():
            raise LlmschedError(f"{flag} {path}: is an input file; name another file")
        if path.is_fifo():
            return  # opening it would wait for a reader
        there = os.path.lexists(path)
        path.open("ab").close()
        if not there:
            path.unlink()


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a LlmschedError that names the flag and the file."""
    try:
        yield
    except OSError as problem:
        raise LlmschedError(f"{flag} {path}: {problem.strerror}") from problem
