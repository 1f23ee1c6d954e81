"""Checkpoint files, opened as mappings from names to tensors that are read on demand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmsched.engine.architecture.text_part import text_tensors
from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.model_files import (
    PICKLE,
    PICKLE_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    numbered_shards,
    refuse_lfs_pointer,
)
from llmsched.engine.progress import Progress

#: Prefixes of the names of types of at most 8 bits. Their values mean nothing without scales, which are other tensors.
_SMALL_FLOATS = ("F8", "F6", "F4")
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int8: "I8"}
_DTYPES |= {torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}
_MAX_NAMES = 5


class LazyTensor:
    """Tensor on disk. Each indexing, such as `tensor[...]`, reads the tensor again.

    If known, `dtype` is the name of its type in safetensors, such as "BF16", and `shape` its shape in the file.
    """

    def __init__(self, read: Callable[[], torch.Tensor], dtype: str = "", shape: Sequence[int] = ()) -> None:
        self.read, self.dtype, self.shape = read, dtype, tuple(shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]


StateDict = Mapping[str, LazyTensor]


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros that takes no memory."""
    return torch.zeros((), dtype=dtype).expand(*shape)


def open_checkpoint(directory: Path) -> StateDict:
    """Open the weights in a Hugging Face directory: safetensors files, or else pytorch_model.bin files.

    Of a multimodal model, only the text part is returned, under the names of a text model. Raises ModelError if a file
    or tensor is missing, damaged or inconsistent.
    """
    for single, index, reader in (
        (SAFETENSORS, SAFETENSORS_INDEX, open_safetensors),
        (PICKLE, PICKLE_INDEX, _open_pickle),
    ):
        if (directory / index).is_file():
            return text_tensors(_open_shards(directory / index, reader))
        if (directory / single).is_file():
            return text_tensors(reader(directory / single))
    if shards := numbered_shards(directory):
        if absent := [shard.name for shard in shards if not shard.is_file()]:
            raise ModelError(f"{directory}: {len(absent)} of {len(shards)} shards missing: {some(absent)}")
        return text_tensors({name: tensor for shard in shards for name, tensor in open_safetensors(shard).items()})
    raise ModelError(
        f"model {directory}: has no weights ({SAFETENSORS}, {SAFETENSORS_INDEX}, {PICKLE} or {PICKLE_INDEX})"
    )


def check_unquantised(state: StateDict, where: str) -> None:
    """Raise ModelError if a checkpoint has tensors of types that need scales. `where` names it in the message."""
    if small := {f"{name} ({each.dtype})" for name, each in state.items() if each.dtype.startswith(_SMALL_FLOATS)}:
        raise ModelError(
            f"{where}: config.json has no quantization_config, but these tensors are quantised: {some(small)}"
        )


def with_progress(state: StateDict, stage: str, progress: Progress) -> dict[str, LazyTensor]:
    """Wrap the tensors in `state` so that each read of a tensor calls `progress`."""
    lock, done, total = threading.Lock(), 0, len(state)

    def reported(tensor: LazyTensor) -> LazyTensor:
        def read() -> torch.Tensor:
            nonlocal done
            value = tensor.read()
            with lock:
                done += 1
                progress(stage, done, total)
            return value

        return LazyTensor(read)

    return {name: reported(tensor) for name, tensor in state.items()}


def some(names: set[str] | list[str]) -> str:
    """Return the first few names in alphabetical order as text, such as "a, b and 3 more"."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + rest


def _open_shards(index: Path, reader: Callable[[Path], dict[str, LazyTensor]]) -> StateDict:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        refuse_lfs_pointer(index)
        raise ModelError(f"{index}: is not a valid index (JSON with a weight_map): {one_line(error)}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to file names")
    if outside := {name for name in weight_map.values() if Path(name).name != name}:
        raise ModelError(f"{index}: shards must be in the same directory as the index, not at {some(outside)}")
    files = set(weight_map.values())
    if absent := {name for name in files if not (index.parent / name).is_file()}:
        raise ModelError(f"{index}: {len(absent)} of {len(files)} shards missing: {some(absent)}; download them again")
    state: dict[str, LazyTensor] = {}
    for file in sorted(files):
        shard = reader(index.parent / file)
        if twice := state.keys() & shard.keys():
            raise ModelError(f"{index.parent / file}: has tensors that another shard has too: {some(twice)}")
        if unknown := {name for name, where in weight_map.items() if where == file and name not in shard}:
            raise ModelError(f"{index.parent / file}: lacks tensors that the index lists for it: {some(unknown)}")
        state.update(shard)
    return state


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Open a safetensors file. Raises ModelError if it cannot be read."""
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        names: list[str] = file.keys()
    except (SafetensorError, OSError) as error:
        refuse_lfs_pointer(path)
        raise ModelError(
            f"{path}: cannot be read, it may be cut short ({one_line(error)}); download it again"
        ) from error
    slices = {name: file.get_slice(name) for name in names}
    return {
        name: LazyTensor(partial(file.get_tensor, name), str(each.get_dtype()), each.get_shape())
        for name, each in slices.items()
    }


def _open_pickle(path: Path) -> dict[str, LazyTensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises a different type for each kind of damage
        refuse_lfs_pointer(path)
        raise ModelError(f"{path}: is damaged, or holds more than tensors ({one_line(error)})") from error
    return {
        name: LazyTensor(tensor.detach, _DTYPES.get(tensor.dtype, str(tensor.dtype)), tensor.shape)
        for name, tensor in tensors.items()
    }
