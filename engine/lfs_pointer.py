"""Git LFS pointers: short texts that stand in for large files until `git lfs pull` fetches the files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from llmsched.engine.errors import ModelError

_BEGINNING = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(path: Path) -> None:
    """Raise ModelError if the file at `path` is a Git LFS pointer."""
    beginning = b""
    with suppress(OSError), path.open("rb") as file:
        beginning = file.read(len(_BEGINNING))
    if beginning == _BEGINNING:
        raise ModelError(
            f"{path}: is a Git LFS pointer, not the file itself; run `git lfs install` and `git lfs pull` in "
            f"{path.parent}, or download the file again"
        )
