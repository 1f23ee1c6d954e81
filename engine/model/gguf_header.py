"""The header of a GGUF file: metadata and where each tensor lies.

gguf-py's own reader makes several numpy arrays for every string, which takes ten seconds for a vocabulary of 128
thousand tokens; this takes a fraction of one. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` in numpy's order (rows first); `data` its blocks' bytes row by row, as gguf.dequantize takes them."""

    name: str
    shape: tuple[int, ...]
    tensor_type: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


def parse_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors by name; tensor data stays on disk until used. Raises ValueError, OSError."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(content)
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version} (or big-endian); supported: 2 and 3, little-endian")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(num_values):
        name = cursor.string()
        metadata[name] = cursor.value(GGUFValueType(cursor.number("I")))
    places = [_place(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    start = math.ceil(cursor.position / alignment) * alignment
    return metadata, {name: _tensor(content, name, shape, kind, start + at) for name, shape, kind, at in places}


def _place(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """Name, shape, type and offset of one tensor."""
    name = cursor.string()
    dimensions = [cursor.number("Q") for _ in range(cursor.number("I"))]
    kind = GGMLQuantizationType(cursor.number("I"))
    return name, tuple(reversed(dimensions)), kind, cursor.number("Q")


def _tensor(
    content: mmap.mmap, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
) -> GGUFTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    num_bytes = math.prod(shape) // block * block_bytes
    if offset + num_bytes > len(content):
        raise ValueError(f"tensor {name} ends at byte {offset + num_bytes} of {len(content)}")
    data = np.frombuffer(content, np.uint8, num_bytes, offset)
    return GGUFTensor(name, shape, kind, data.reshape(quant_shape_to_byte_shape(shape, kind)))


class _Cursor:
    """Reads forward through the header. Raises ValueError where the file ends too soon."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start, self.position = self.position, self.position + num_bytes
        if self.position > len(self.content):
            raise ValueError(f"its header ends at byte {len(self.content)}")
        return self.content[start : self.position]

    def number(self, code: str) -> int:
        return int(self.numbers(code, 1)[0])

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code)))

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        """One value. A single float32 becomes the shortest decimal that means it: 9.99999974e-06 is 1e-05."""
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self.array(GGUFValueType(self.number("I")), self.number("Q"))
        number = self.numbers(_FORMATS[kind], 1)[0]
        return float(str(np.float32(number))) if kind == GGUFValueType.FLOAT32 else number

    def array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind in _FORMATS:
            return list(self.numbers(_FORMATS[kind], count))
        read: Callable[[], Any] = self.string if kind == GGUFValueType.STRING else lambda: self.value(kind)
        return [read() for _ in range(count)]
