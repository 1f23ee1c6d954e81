"""Conversion of quantised GGUF tensors to float32 with gguf-py."""

from __future__ import annotations

import numpy as np
from gguf import dequantize

from llmsched.engine.model.gguf_file import Array, GGUFFile, unknown_type


def dequantized(file: GGUFFile, name: str) -> Array:
    """Return the tensor `name` as a new float32 array. Raises ModelError for an unknown quantisation type."""
    tensor = file.tensors[name]
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise unknown_type(file.path, name, tensor) from error
    # float32 tensors are views of the read-only file, so they must be copied
    return np.array(values, dtype=np.float32, copy=not values.flags.writeable)
