"""Quantised matrix in a checkpoint: its tensors, its shape, and its size in memory."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from llmsched.engine.errors import ModelError

Layout = Literal["awq", "gptq", "int32", "int8", "fp8", "fp4", "bitsandbytes", "experts"]

#: Packed matrices have a multiple of 32 columns, and groups of a multiple of 16.
_COLUMNS, _GROUP = 32, 16


#: Name of the matrices that expand latent vectors (MLA). They are dequantised, because a decode multiplies queries by
#: one part of them and outputs by the transposed other part (see kernels/latents.py).
EXPANDING = "kv_b_proj"
#: Name of the modules with a matrix that Mamba-1 uses without calling the module.
TIME_STEPS = "dt_proj"


class Stored(NamedTuple):
    """Tensor in a file. `dtype` is the name of its type in safetensors, such as "F8_E4M3"."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], bytes]
    size: int = 0  # bytes in the file, if known


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """Quantised matrix in a checkpoint."""

    weight: str  # name of the matrix in the model
    layout: Layout
    prefix: str  # what the names of its tensors begin with
    parts: frozenset[str]  # rest of the names
    shape: tuple[int, ...]  # in the model
    code: str  # kind of its codes, such as "int4" or "nf4"
    span: tuple[int, int]  # rows and columns that share a scale in the file
    scale_bytes: int  # in memory
    has_zeros: bool = False  # True if zero points may be anywhere; False if they are in the middle of the codes
    order: int = 0  # hash of the order of columns in the file; 0 if it is that of the model
    shares_order: bool = False  # True if the order in memory belongs to another matrix of the same expert

    @property
    def is_kept(self) -> bool:
        """True if the matrix can stay quantised by itself. Matrices of single experts must be joined first."""
        dense = any(f".{name}." in self.weight for name in ("experts", EXPANDING, TIME_STEPS))
        return self.layout == "experts" or not dense

    @property
    def is_ordered(self) -> bool:
        """True if the file has the columns in another order than the model."""
        return self.order != 0

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties in which the matrices of experts must agree so that they can be joined."""
        return self.code, self.group, self.scale_bytes, self.has_zeros, self.is_ordered

    @property
    def bits(self) -> int:
        return 8 if self.code in ("int8", "fp8") else 4

    @property
    def offset_bytes(self) -> int:
        """Bytes of an offset in memory; 0 without offsets."""
        # In memory, codes of 8 bits are signed. Those of 4 bits are not, so that they have the offset -8 x scale.
        return 4 if self.has_zeros else self.scale_bytes if self.code == "int4" else 0

    @property
    def group(self) -> int:
        """Number of neighbouring columns that share a scale in memory."""
        columns = self.shape[-2 if self.layout == "experts" else -1]  # those are held transposed
        return min(math.gcd(self.span[1], columns), columns)

    @property
    def packed_bytes(self) -> int:
        """Bytes in memory if the matrix stays quantised."""
        count = math.prod(self.shape)
        groups = count // self.group * (self.scale_bytes + self.offset_bytes)
        return count * self.bits // 8 + groups + (8 * self.shape[1] if self.is_ordered and not self.shares_order else 0)


class MatrixTensors:
    """Tensors of one matrix."""

    def __init__(self, stored: Mapping[str, Stored], settings: Mapping[str, Any], where: str, prefix: str) -> None:
        self.stored, self.settings, self.where, self.prefix = stored, settings, where, prefix
        self.used: set[str] = set()

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.where}: {self.prefix.rstrip('._')}: {text}; the checkpoint is damaged or unsupported")

    def find(self, *names: str) -> Stored | None:
        """Return the first of the tensors that exists, or None."""
        for name in names:
            if (tensor := self.stored.get(self.prefix + name)) is not None:
                self.used.add(name)
                return tensor
        return None

    def need(self, names: str, dtypes: Mapping[str, int] | tuple[str, ...], dims: int | None = None) -> Stored:
        """Return the first existing tensor of `names` (split at spaces).

        Raises ModelError for a wrong type or shape.
        """
        if (tensor := self.find(*names.split())) is None:
            raise self.error(f"its quantised weight has no {' or '.join(names.split())}")
        if tensor.dtype not in dtypes:
            raise self.error(f"{names} has type {tensor.dtype} instead of {' or '.join(dtypes)}")
        if not math.prod(tensor.shape) or (dims is not None and len(tensor.shape) != dims):
            raise self.error(f"{names} has shape {tensor.shape}, expected {dims or 'some'} dimensions")
        return tensor

    def check(self, name: str, tensor: Stored, *shapes: tuple[int, ...]) -> None:
        if tensor.shape not in shapes:
            raise self.error(f"{name} has shape {tensor.shape} instead of {' or '.join(map(str, shapes))}")

    def made(self, layout: Layout, shape: tuple[int, ...], code: str, **more: Any) -> QuantisedMatrix:
        weight = f"{self.prefix}weight"
        matrix = QuantisedMatrix(weight, layout, self.prefix, frozenset(self.used), shape, code, **more)
        if shape[-1] % _COLUMNS or matrix.group % _GROUP:
            raise self.error(f"{shape[-1]} columns in groups of {matrix.group}; multiples of 32 and 16 are supported")
        return matrix

    def span(self, name: str, scale: Stored, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of rows and columns that share a value of `scale`."""
        rows, columns = shape
        if math.prod(scale.shape) == 1:
            return rows, columns
        if scale.shape in ((rows,), (rows, 1)):
            return 1, columns
        if len(scale.shape) == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
            return 1, columns // scale.shape[1]
        height, width = self.block
        self.check(name, scale, (1,), (rows, 1), (-(-rows // height), -(-columns // width)))
        return height, width

    @property
    def block(self) -> tuple[int, int]:
        groups = (self.settings.get("config_groups") or {}).values()
        blocks = [(group.get("weights") or {}).get("block_structure") for group in groups]
        found = next(filter(None, [self.settings.get("weight_block_size"), *blocks]), (128, 128))
        height, width = found.split("x") if isinstance(found, str) else found
        return int(height), int(width)

    def order(self, name: str, columns: int, count: int) -> int:
        """Return a hash of the order of columns by their groups, or 0 if the columns of each group are neighbours.

        The tensor `name`, if it exists, has the group of each column.
        """
        tensor = self.find(name)
        if tensor is None:
            return 0
        self.need(name, ("I32",))
        self.check(name, tensor, (columns,))
        groups = array("i", tensor.read()).tolist()
        if min(groups) < 0 or not any(groups):  # not set
            return 0
        in_order = [column // (columns // count) for column in range(columns)]
        if sorted(groups) != in_order:
            raise self.error(f"{name} does not divide {columns} columns into {count} equal groups")
        return zlib.crc32(array("i", groups).tobytes()) or 1 if groups != in_order else 0

    def groups(self, columns: int, count: int) -> tuple[int, int]:
        if columns % count:
            raise self.error(f"{columns} columns cannot be divided into {count} groups")
        return 1, columns // count
