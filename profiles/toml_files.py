"""Readers and writers of TOML files: tables that are shipped with llmsched, and profiles."""

from __future__ import annotations

import errno
import os
import tempfile
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

Scalar = str | int | float | bool
Entry = TypeVar("Entry")


class UnknownNameError(LookupError):
    """Error for a name that is not in a shipped table. The message lists known names."""


class ProfileError(ValueError):
    """Error for a profile that cannot be found, read or written."""


def shipped_table(name: str) -> dict[str, Any]:
    """Return the content of the TOML file `name` in this package."""
    return tomllib.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def find_entry(entries: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """Return the entry called `name`, or raise UnknownNameError. `kind` is the word for an entry in the message."""
    if name not in entries:
        raise UnknownNameError(f"{name!r} is not a known {kind}; known are {', '.join(entries)}")
    return entries[name]


def names_in(directory: Path) -> list[str]:
    """Return the sorted names of the TOML files in a directory, without .toml."""
    return sorted(path.stem for path in directory.glob("*.toml"))


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Return the content of a TOML file. Error messages call the file a `kind`.

    Raises FileNotFoundError if the file does not exist, and ProfileError if the file cannot be read.
    """
    try:
        return tomllib.loads(read_file(path))
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ProfileError(f"{kind} {path}: {' '.join(str(problem).split())}") from problem


def check_table(where: str, table: Any) -> None:
    """Raise ProfileError unless `table` maps names to strings, numbers and booleans. `where` begins the message."""
    if not isinstance(table, dict):
        raise ProfileError(f"{where} is not a table")
    for key, value in table.items():
        if not isinstance(value, Scalar):
            raise ProfileError(f"{where}.{key} must be a string, a number, true or false")


def created_in(where: str, content: Mapping[str, Any]) -> datetime:
    """Return the time `created` in the content of a file, or 1970 if there is none.

    Raises ProfileError if the value is not a date and time. `where` begins the message.
    """
    created = content.get("created", datetime.fromtimestamp(0, UTC))
    if not isinstance(created, datetime):
        raise ProfileError(f"{where}: created is not a date and time such as 2026-01-31T12:00:00Z")
    return created


def now() -> datetime:
    """Return the current time in UTC, without fractions of a second."""
    return datetime.now(UTC).replace(microsecond=0)


def check_directory(path: Path) -> None:
    """Create a directory if it is missing. Raises ProfileError if files cannot be written in the directory."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as problem:
        raise ProfileError(f"profiles cannot be written in {path}: {problem.strerror}") from problem


def check_writable(path: Path) -> None:
    """Raise ProfileError if `write_file` cannot write a file at `path`. A missing directory is created."""
    _check_regular(path)
    check_directory(path.parent)


def read_file(path: Path) -> str:
    """Return the text of a regular file. Raises OSError for pipes and devices, which may be endless."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file")
    return path.read_text(encoding="utf-8")


def write_file(path: Path, text: str) -> None:
    """Write a file, or raise ProfileError and leave an older file at `path` unchanged."""
    _check_regular(path)
    try:
        replace_file(path, text)
    except OSError as problem:
        raise ProfileError(f"profile {path} cannot be written: {' '.join(str(problem).split())}") from problem


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: readers see either all the old text or all the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", encoding="utf-8", delete=False) as part:
        try:
            part.write(text)
            part.close()
            os.chmod(part.name, 0o644)
            os.replace(part.name, path)
        except OSError:
            Path(part.name).unlink(missing_ok=True)
            raise


def _check_regular(path: Path) -> None:
    """Raise ProfileError if a directory, a pipe or a device is at `path`."""
    try:
        if path.exists() and not path.is_file():
            raise ProfileError(f"profile {path} cannot be written: it is not a regular file")
    except OSError as problem:
        raise ProfileError(f"profile {path} cannot be written: {problem.strerror}") from problem
