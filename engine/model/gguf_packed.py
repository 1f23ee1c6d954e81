"""Conversion of quantised GGUF tensors to packed matrices, without a change of values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4, Q4_K

from llmsched.engine.architecture.weights import Weights, experts_by_layer, wide_note, wide_parts
from llmsched.engine.errors import ModelError
from llmsched.engine.model.gguf_file import ROPE_TABLES, GGUFFile
from llmsched.kernels.packed_matrix import PackedMatrix

Bytes = npt.NDArray[np.uint8]
#: Part of the names of tensors with the matrices, or the biases, of all experts of a layer.
EXPERTS = "_exps"
#: Codes, scales and offsets (None: all are 0) of blocks. Their first dimension has the blocks of all rows in order.
Parts = tuple[npt.NDArray[np.uint8 | np.int8], npt.NDArray[np.floating], npt.NDArray[np.floating] | None]


class Packing(NamedTuple):
    convert: Callable[[Bytes], Parts]  # takes blocks [B, bytes]
    bytes_per_weight: float  # in the packed matrix
    table: tuple[int, ...] | None = None  # numbers for which the codes stand; None: codes stand for themselves


def packing_of(file: GGUFFile, name: str) -> Packing | None:
    """Return the way in which a tensor is packed, or None if the tensor is not packed.

    Experts of a layer are packed only if all their matrices are, and only if gate and up have the same type.
    """
    tensor = file.tensors[name]
    if EXPERTS in name and name.endswith(".weight"):
        layer = name.partition(".ffn_")[0]
        found = [file.tensors.get(f"{layer}.ffn_{part}{EXPERTS}.weight") for part in ("gate", "up", "down")]
        gate, up, down = (None if each is None else PACKINGS.get(each.tensor_type) for each in found)
        return PACKINGS[tensor.tensor_type] if gate is not None and gate == up and down is not None else None
    dense = len(tensor.shape) != 2 or ".ffn_gate_inp" in name or ".attn_kv_b." in name
    return None if dense else PACKINGS.get(tensor.tensor_type)


def packed_weights(file: GGUFFile, dtype_bytes: int) -> Weights:
    """Return the size of the weights if matrices stay packed and other tensors take `dtype_bytes` bytes per number."""
    sizes, types, wide = dict[str, float](), set(), list[str]()
    for name, tensor in file.tensors.items():
        if name in ROPE_TABLES:
            continue
        if packing := packing_of(file, name):
            types.add(tensor.tensor_type.name)
        elif len(tensor.shape) > 1 and "_inp" not in name and name.endswith(".weight"):
            wide.append(name)
        sizes[name] = math.prod(tensor.shape) * (packing.bytes_per_weight if packing else dtype_bytes)
    packed_types = tuple(sorted(types))
    total, experts = round(sum(sizes.values())), experts_by_layer(sizes)
    if not packed_types:
        return Weights(total, "gguf", exact=True, experts=experts)
    parts = wide_parts(wide)
    notes = (f"matrices in {', '.join(packed_types)} stay quantised", *wide_note(parts, dtype_bytes))
    return Weights(total, "gguf", True, notes, None, packed_types, parts, experts)


def packed(file: GGUFFile, name: str) -> PackedMatrix:
    """Return the tensor `name`, whose type must be in PACKINGS, as a packed matrix [M, N], for experts [E x M, N]."""
    import torch

    tensor = file.tensors[name]
    packing = PACKINGS[tensor.tensor_type]
    _, block_bytes = GGML_QUANT_SIZES[tensor.tensor_type]
    parts = packing.convert(np.ascontiguousarray(tensor.data).reshape(-1, block_bytes))
    given = [part for part in parts if part is not None]
    if not all(np.isfinite(part).all() for part in given[1:]):
        raise ModelError(f"{file.path}: scales of {name} are not finite; the file is damaged, download it again")
    # Parts of the read-only file are copied.
    rows = math.prod(tensor.shape[:-1])
    codes, scales, *offsets = (torch.from_numpy(part.reshape(rows, -1).copy()) for part in given)
    table = None if packing.table is None else torch.tensor(packing.table, dtype=torch.float32)
    return PackedMatrix(codes, scales, *offsets)._replace(table=table)


def _halves(blocks: Bytes, *columns: int) -> list[npt.NDArray[np.float16]]:
    """Return the float16 numbers at each byte offset in `columns` of the blocks, as [B, 1]."""
    return [blocks[:, column : column + 2].copy().view(np.float16) for column in columns]


def _nibbles(pairs: Bytes) -> Bytes:
    """Return the 4-bit codes in `pairs` [B, bytes]: the lower halves of all bytes, then the upper halves."""
    return np.concatenate([pairs & 15, pairs >> 4], axis=1)


def _q4_0(blocks: Bytes) -> Parts:
    (scales,) = _halves(blocks, 0)
    return blocks[:, 2:], scales, scales * np.float16(-8)


def _q4_1(blocks: Bytes) -> Parts:
    scales, offsets = _halves(blocks, 0, 2)
    return blocks[:, 4:], scales, offsets


def _q5(blocks: Bytes) -> Bytes:
    """Return the codes (0 to 31) of blocks that hold the high bits of all codes first, then their lower 4 bits."""
    high: Bytes = np.unpackbits(blocks[:, :4], axis=1, bitorder="little")
    return _nibbles(blocks[:, 4:]) | np.left_shift(high, 4)


def _q5_0(blocks: Bytes) -> Parts:
    (scales,) = _halves(blocks, 0)
    return _q5(blocks[:, 2:]).astype(np.int8) - np.int8(16), scales, None


def _q5_1(blocks: Bytes) -> Parts:
    scales, offsets = _halves(blocks, 0, 2)
    return _q5(blocks[:, 4:]).astype(np.int8), scales, offsets


def _q8_0(blocks: Bytes) -> Parts:
    (scales,) = _halves(blocks, 0)
    return blocks[:, 2:].view(np.int8), scales, None


def _k_scales(blocks: Bytes) -> list[npt.NDArray[np.float32]]:
    scale, minimum = (half.astype(np.float32) for half in _halves(blocks, 0, 2))
    scales, minima = Q4_K.get_scale_min(blocks[:, 4:16])
    return [scale * scales, -(minimum * minima)]


def _k_codes(blocks: Bytes) -> Bytes:
    """Return the lower 4 bits of the codes in blocks of type Q4_K or Q5_K, [B, 256]."""
    return _nibbles(blocks[:, -128:].reshape(-1, 32)).reshape(len(blocks), 256)


def _q4_k(blocks: Bytes) -> Parts:
    codes = _k_codes(blocks).reshape(-1, 2, 16)
    scales, offsets = _k_scales(blocks)
    return codes[:, 0] | codes[:, 1] << 4, scales, offsets


def _q5_k(blocks: Bytes) -> Parts:
    bits = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & 1  # bit g of byte i belongs to code i of group g
    codes = _k_codes(blocks) | bits.swapaxes(1, 2).reshape(-1, 256) << 4
    scales, offsets = _k_scales(blocks)
    return codes.astype(np.int8), scales, offsets


def _q6_k(blocks: Bytes) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 256)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1) & 3
    codes = (low | pairs.reshape(-1, 256) << 4).astype(np.int8) - np.int8(32)
    scale, scales = _halves(blocks, 208)[0].astype(np.float32), blocks[:, 192:208].view(np.int8)
    return codes, scale * scales, None


def _iq4_nl(blocks: Bytes) -> Parts:
    (scales,) = _halves(blocks, 0)
    return blocks[:, 2:], scales, None


def _iq4_xs(blocks: Bytes) -> Parts:
    scale, high = _halves(blocks, 0)[0].astype(np.float32), blocks[:, 2:4].copy().view(np.uint16)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(len(blocks), 8)
    upper = (high >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    scales = (low | upper << 4).astype(np.int8) - np.int8(32)
    return blocks[:, 8:], scale * scales, None


def _mxfp4(blocks: Bytes) -> Parts:
    scales: npt.NDArray[np.float32] = MXFP4.e8m0_to_fp32_half(blocks[:, :1])
    return blocks[:, 1:], scales, None


#: Types whose matrices are packed. Q4_0 to Q8_0 have float16 scales for 32 weights, Q4_K and Q5_K have products of two
#: scales, Q6_K has such products for 16 weights, and the codes of IQ4_NL, IQ4_XS and MXFP4 are places in a table.
PACKINGS = {
    GGMLQuantizationType.Q4_0: Packing(_q4_0, 0.5 + 4 / 32),
    GGMLQuantizationType.Q4_1: Packing(_q4_1, 0.5 + 4 / 32),
    GGMLQuantizationType.Q5_0: Packing(_q5_0, 1 + 2 / 32),
    GGMLQuantizationType.Q5_1: Packing(_q5_1, 1 + 4 / 32),
    GGMLQuantizationType.Q8_0: Packing(_q8_0, 1 + 2 / 32),
    GGMLQuantizationType.Q4_K: Packing(_q4_k, 0.5 + 8 / 32),
    GGMLQuantizationType.Q5_K: Packing(_q5_k, 1 + 8 / 32),
    GGMLQuantizationType.Q6_K: Packing(_q6_k, 1 + 4 / 16),
    GGMLQuantizationType.IQ4_NL: Packing(_iq4_nl, 0.5 + 2 / 32, IQ4_NL.kvalues),
    GGMLQuantizationType.IQ4_XS: Packing(_iq4_xs, 0.5 + 4 / 32, IQ4_NL.kvalues),
    GGMLQuantizationType.MXFP4: Packing(_mxfp4, 0.5 + 4 / 32, MXFP4.kvalues),
}
