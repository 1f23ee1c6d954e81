"""Names of a model's files in its directory and on the hub, Git LFS pointers, and the directory of cached files."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from llmsched.engine.errors import ModelError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
#: File of ModelOpt that describes how the weights are quantised.
QUANTIZATION_FILE = "hf_quant_config.json"
#: Files of a hub repository that serving needs; other formats of the same weights are not downloaded.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
HUB_IGNORED = ("*/*", "consolidated*")
#: Weights to download from a repository without safetensors files.
HUB_PICKLES = "pytorch_model*.bin"

#: Environment variable that chooses the directory of cached files.
CACHE_VARIABLE = "LLMSCHED_CACHE"

_SHARD = re.compile(r"model-\d{5}-of-(?P<total>\d{5})\.safetensors")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def numbered_shards(directory: Path) -> list[Path]:
    """Return the paths of all shards model-0000K-of-0000N.safetensors, if at least one of them exists."""
    totals = {match["total"] for file in directory.glob("model-*") if (match := _SHARD.fullmatch(file.name))}
    return [
        directory / f"model-{number:05}-of-{total}.safetensors"
        for total in sorted(totals)
        for number in range(1, int(total) + 1)
    ]


def refuse_lfs_pointer(path: Path) -> None:
    """Raise ModelError if the file is a Git LFS pointer: a short text that `git lfs pull` replaces by the real file."""
    beginning = b""
    with suppress(OSError), path.open("rb") as file:
        beginning = file.read(len(_LFS_POINTER))
    if beginning == _LFS_POINTER:
        raise ModelError(
            f"{path}: is a Git LFS pointer, not the file itself; run `git lfs install` and `git lfs pull` in "
            f"{path.parent}, or download the file again"
        )


def cache_directory() -> Path:
    """Return the directory of cached files: $LLMSCHED_CACHE if set, else llmsched in the user's cache directory."""
    import platformdirs

    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(os.path.expanduser(chosen)) if chosen else Path(platformdirs.user_cache_dir("llmsched"))
