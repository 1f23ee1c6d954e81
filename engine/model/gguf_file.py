"""Reader of .gguf files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
# gguf-py's own reader creates several numpy arrays for every string, so it takes ten seconds for a vocabulary of
# 128,000 tokens.

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape

from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.model_files import refuse_lfs_pointer

Array = npt.NDArray[np.float32]

_DENSE = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
#: Supported architectures, by their names in GGUF. Mixtral is a "llama" with experts.
ARCHITECTURES = (*_DENSE, "qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "deepseek2")
#: Prefixes of the names of unsupported types with 1 to 3 bits per weight, although gguf-py can read them.
_UNSUPPORTED_TYPES = ("IQ1", "IQ2", "IQ3", "TQ")
#: Tables of rope factors, which are part of the config and not of the weights.
ROPE_TABLES = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: Mapping[str, Any]  # Python values
    tensors: Mapping[str, GGUFTensor]  # memory-mapped and still quantised

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return metadata under the architecture's prefix: in a llama file, `block_count` means llama.block_count."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """Return a metadata value as `get(...)` does, but raise ModelError if the value is missing."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: lacks {self.architecture}.{key}, so the model's shape is unknown")
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Parse a .gguf file, or return the cached result if the file has not changed.

    Raises ModelError if the file is damaged, is one part of a split file, or has an unsupported architecture.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({one_line(error)})") from error
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def _read(path: Path, _mtime_ns: int, _size: int) -> GGUFFile:
    try:
        metadata, tensors = parse_gguf(path)
    except (ValueError, OSError) as error:
        refuse_lfs_pointer(path)
        raise ModelError(
            f"{path}: is not a readable GGUF file, or is cut short ({one_line(error)}); download it again"
        ) from error
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{path}: is one part of a split file; join the parts with llama-gguf-split --merge")
    found = metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        raise ModelError(f"{path}: GGUF architecture {found!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    for name, tensor in tensors.items():
        if tensor.tensor_type.name.startswith(_UNSUPPORTED_TYPES):
            raise unknown_type(path, name, tensor)
    return GGUFFile(path, metadata, tensors)


def unknown_type(path: Path, name: str, tensor: GGUFTensor) -> ModelError:
    return ModelError(
        f"{path}: {name} is quantised as {tensor.tensor_type.name}, which is not supported; "
        "use a file of another quantisation, e.g. Q4_K_M, IQ4_XS or Q8_0"
    )


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
    shape: tuple[int, ...]  # in numpy's order of dimensions
    tensor_type: GGMLQuantizationType
    data: npt.NDArray[np.uint8]  # one row of quantised bytes per row of the tensor


def parse_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata and the tensors of a .gguf file. Raises ValueError or OSError for an unreadable file."""
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
    places = []
    for _ in range(num_tensors):
        name = cursor.string()
        dimensions = [cursor.number("Q") for _ in range(cursor.number("I"))]
        kind = GGMLQuantizationType(cursor.number("I"))
        places.append((name, tuple(reversed(dimensions)), kind, cursor.number("Q")))
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    start = math.ceil(cursor.position / alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in places:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) // block * block_bytes
        if start + offset + num_bytes > len(content):
            raise ValueError(
                f"tensor {name} ends at byte {start + offset + num_bytes}, but the file has {len(content)} bytes"
            )
        data = np.frombuffer(content, np.uint8, num_bytes, start + offset)
        tensors[name] = GGUFTensor(shape, kind, data.reshape(quant_shape_to_byte_shape(shape, kind)))
    return metadata, tensors


class _Cursor:
    """Reader of a .gguf file's header. The methods raise ValueError at the end of the file."""

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
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self.array(GGUFValueType(self.number("I")), self.number("Q"))
        number = self.numbers(_FORMATS[kind], 1)[0]
        # The shortest decimal form of a float32: 1e-05, not 9.99999974e-06.
        return float(str(np.float32(number))) if kind == GGUFValueType.FLOAT32 else number

    def array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind in _FORMATS:
            return list(self.numbers(_FORMATS[kind], count))
        read: Callable[[], Any] = self.string if kind == GGUFValueType.STRING else lambda: self.value(kind)
        return [read() for _ in range(count)]
