"""Opening .gguf files: metadata and quantised tensors of an architecture that is supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import dequantize

from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.model.gguf_header import GGUFTensor, parse_gguf

Array = npt.NDArray[np.float32]

#: GGUF architecture -> (transformers model type, its class for causal language modelling).
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file: metadata as plain Python values, tensors memory-mapped and still quantised."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section, e.g. get("block_count") reads llama.block_count."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """As get, but a missing value raises ModelError."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: lacks {self.architecture}.{key}, so the model's shape is unknown")
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Open a .gguf file. Raises ModelError if it is damaged, split or of an architecture that is not supported.

    A file is parsed once; a changed one (time or size) again.
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
        raise ModelError(
            f"{path}: is no readable GGUF file, or is cut short ({one_line(error)}); download it again"
        ) from error
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{path}: is one part of a split file; join the parts with llama-gguf-split --merge")
    found = metadata.get("general.architecture")
    if found not in ARCHITECTURES:
        raise ModelError(f"{path}: GGUF architecture {found!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    file = GGUFFile(path, metadata, tensors)
    if file.get("expert_count"):
        raise ModelError(f"{path}: mixture-of-experts GGUF files are not supported; use the Hugging Face directory")
    return file


def dequantized(file: GGUFFile, name: str) -> Array:
    """One tensor as float32, in an array of its own. Raises ModelError for a type that gguf-py does not know."""
    tensor = file.tensors[name]
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelError(
            f"{file.path}: {name} is quantised as {tensor.tensor_type.name}, which cannot be read; "
            "use a file of another quantisation, e.g. Q4_K_M or Q8_0"
        ) from error
    # float32 is not converted: it is a view of the read-only file
    return np.array(values, dtype=np.float32, copy=not values.flags.writeable)
