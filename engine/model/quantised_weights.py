"""Conversion of a Hugging Face checkpoint's quantised matrices to packed matrices, without a change of values."""
# Products with a packed matrix take the inputs as they are: settings that quantise inputs are not applied.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmsched.engine.architecture.quantised_layouts import STATE, joined_experts, read_matrices
from llmsched.engine.architecture.quantised_matrix import Layout, QuantisedMatrix, Stored
from llmsched.engine.errors import ModelError
from llmsched.engine.model.checkpoint import LazyTensor, StateDict, placeholder
from llmsched.kernels.packed_matrix import PackedMatrix, packed_pairs

#: Returns the tensor of a part, such as "weight_scale".
Get = Callable[[str], Tensor]

#: Numbers of the 4-bit floats that have one bit for the sign, two for the exponent and one for the mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor([*_FP4, *(-number for number in _FP4)])
#: Place of each column in a word of AutoAWQ, which holds the columns 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


class Parts(NamedTuple):
    """Tensors of a matrix [M, N]. A number is (code - zero) x scale, or table[code] x scale.

    `codes` and `table` are copies, because tensors of a file are pages of this file, which may be read again and again.
    """

    codes: Tensor  # [M, N]: uint8 with 4 bits, int8 or float8_e4m3fn
    scales: Tensor  # in the order of rows and then groups
    zeros: Tensor | None = None  # as `scales`. None: in the middle of the codes
    table: Tensor | None = None


def dequantised_state_dict(
    state: StateDict,
    settings: Mapping[str, Any],
    where: str,
    packed_matrices: dict[str, PackedMatrix] | None,
    dtype: torch.dtype,
    model_type: str | None = None,
) -> StateDict:
    """Return the tensors of a checkpoint whose quantization_config is `settings`, with dequantised matrices.

    If `packed_matrices` is given, each read of a matrix that can stay quantised adds the packed matrix to this mapping.
    The read then returns a placeholder of the type `dtype`, which has the right shape but takes no memory. The matrices
    of single experts are then joined, if models of `model_type` hold them so. Raises ModelError, in which `where` names
    the checkpoint, if a tensor is missing or has a wrong shape or type.
    """
    stored = {name: Stored(tensor.dtype, tensor.shape, partial(_bytes, tensor)) for name, tensor in state.items()}
    matrices, parts = read_matrices(stored, settings, where)

    def get_of(matrix: QuantisedMatrix) -> Get:
        return lambda part: state[matrix.prefix + part].read()

    def read(matrix: QuantisedMatrix) -> PackedMatrix:
        of_experts = matrix.layout == "experts"
        return packed_experts(get_of(matrix)) if of_experts else packed(matrix, get_of(matrix), settings, where)

    def kept(name: str, shape: tuple[int, ...], members: Sequence[QuantisedMatrix]) -> LazyTensor:
        def pack() -> Tensor:
            assert packed_matrices is not None
            packed_matrices[name] = stacked_experts([read(matrix) for matrix in members], shape[0])
            return placeholder(shape, dtype)

        return LazyTensor(pack)

    def single(matrix: QuantisedMatrix) -> LazyTensor:
        if packed_matrices is not None and matrix.is_kept:
            return kept(matrix.weight, matrix.shape, [matrix])
        if matrix.layout == "experts":
            return LazyTensor(lambda: _experts(matrix, get_of(matrix), dtype))
        return LazyTensor(lambda: read(matrix).unpacked().to(dtype))

    def joined(name: str, members: Sequence[QuantisedMatrix]) -> LazyTensor:
        count = len({matrix.prefix.rpartition(".experts.")[2].split(".")[0] for matrix in members})
        rows = sum(matrix.shape[0] for matrix in members) // count
        return kept(name, (count, rows, members[0].shape[1]), members)

    experts = {} if packed_matrices is None else joined_experts(matrices, state, model_type)
    in_joined = {matrix.weight for members in experts.values() for matrix in members}
    plain = {name: tensor for name, tensor in state.items() if name not in parts}
    others = {name: single(matrix) for name, matrix in matrices.items() if name not in in_joined}
    return plain | others | {name: joined(name, members) for name, members in experts.items()}


def stacked_experts(matrices: Sequence[PackedMatrix], num_experts: int) -> PackedMatrix:
    """Join the rows of all experts' matrices, an equal number per expert. A single matrix is returned as it is."""
    if len(matrices) == 1:
        return matrices[0]
    offsets = [matrix.offsets for matrix in matrices if matrix.offsets is not None]
    orders = [matrix.order for matrix in matrices if matrix.order is not None][:: len(matrices) // num_experts]
    codes, scales = (torch.cat(parts) for parts in zip(*(matrix[:2] for matrix in matrices), strict=True))
    return matrices[0]._replace(
        codes=codes,
        scales=scales,
        offsets=torch.cat(offsets) if offsets else None,
        order=torch.stack(orders) if orders else None,
    )


def packed(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any], where: str) -> PackedMatrix:
    """Return a quantised matrix as a packed matrix. Raises ModelError if its scales or zero points are damaged."""
    codes, scales, zeros, table = _READERS[matrix.layout](matrix, get, settings)
    scales = _spread(scales, matrix)
    if not scales.isfinite().all():
        raise ModelError(f"{where}: scales of {matrix.weight} are not finite; the checkpoint is damaged")
    offsets = order = None
    if matrix.has_zeros and zeros is not None:
        offsets = -(_spread(zeros.float(), matrix) * scales.float())
    elif matrix.code == "int4":
        offsets = scales * -8
    if not matrix.has_zeros and zeros is not None and (zeros != (8 if matrix.bits == 4 else 0)).any():
        raise ModelError(f"{where}: {matrix.weight} has zero points that differ, although quantization_config has sym")
    if matrix.is_ordered:
        groups = get("g_idx" if "g_idx" in matrix.parts else "weight_g_idx")
        order = groups.argsort(stable=True)
        codes = codes[:, order]
    if matrix.bits == 4:
        codes = packed_pairs(codes)
    return PackedMatrix(codes.contiguous(), scales, offsets, table, order)


def _spread(values: Tensor, matrix: QuantisedMatrix) -> Tensor:
    """Return scales or zero points as [M, N / group]. Values for a block of rows are repeated for each row."""
    (rows, columns), (height, width), group = matrix.shape, matrix.span, matrix.group
    if values.numel() != rows * columns // group:
        blocks = values.reshape(-(-rows // height), -(-columns // width))
        values = blocks[torch.arange(rows) // height][:, torch.arange(0, columns, group) // width]
    return values.reshape(rows, -1).clone(memory_format=torch.contiguous_format)


def _bytes(tensor: LazyTensor) -> bytes:
    return tensor.read().reshape(-1).view(torch.uint8).numpy().tobytes()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the codes in int32 `words` [A, B], or 4-bit codes in bytes, as [A, C]: uint8 or, with 8 bits, int8."""
    parts = words.contiguous().view(torch.uint8)
    if bits == 8:
        return (parts ^ 128).view(torch.int8)
    return torch.stack((parts & 15, parts >> 4), -1).flatten(1)


def _awq(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any]) -> Parts:
    def columns(words: Tensor) -> Tensor:
        return _unpacked(words, 4).view(len(words), -1, 8)[..., _AWQ_PLACES].flatten(1)

    return Parts(columns(get("qweight")).T, get("scales").T, columns(get("qzeros")).T)


def _gptq(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any]) -> Parts:
    # The first version of the format stores zero points minus 1.
    added = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    zeros = _unpacked(get("qzeros"), matrix.bits).int() + added
    return Parts(_unpacked(get("qweight").T, matrix.bits), get("scales").T, zeros.T)


def _int32(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any]) -> Parts:
    codes, zeros = _unpacked(get("weight_packed"), matrix.bits)[:, : matrix.shape[1]], None
    if matrix.has_zeros:
        zeros = get("weight_zero_point")
        if zeros.dtype == torch.int32:
            zeros = _unpacked(zeros.T, matrix.bits)[:, : matrix.shape[0]].T
        elif matrix.bits == 4:
            zeros = zeros + 8
    return Parts(codes, get("weight_scale"), zeros)


def _int8(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any]) -> Parts:
    scales = get("SCB") * (1 / 127) if "SCB" in matrix.parts else get("weight_scale")
    return Parts(get("weight").clone(), scales, get("weight_zero_point") if matrix.has_zeros else None)


def _fp8(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any]) -> Parts:
    scales = get("weight_scale" if "weight_scale" in matrix.parts else "weight_scale_inv")
    return Parts(get("weight").clone(), _floats(scales))


def _fp4(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any]) -> Parts:
    scales = get("weight_scale")
    if matrix.code == "mxfp4":
        scales = _floats(scales)
    elif "weight_global_scale" in matrix.parts:
        scales = scales.float() / get("weight_global_scale")
    else:
        scales = scales.float() * get("weight_scale_2")
    codes = get("weight_packed" if "weight_packed" in matrix.parts else "weight")
    return Parts(_unpacked(codes, 4), scales, table=FP4.clone())


def _bitsandbytes(matrix: QuantisedMatrix, get: Get, settings: Mapping[str, Any]) -> Parts:
    pairs, maxima = get("weight").reshape(-1), get("weight.absmax")
    if maxima.dtype == torch.uint8:
        state = json.loads(bytes(get(next(part for part in matrix.parts if STATE in part)).tolist()))
        nested, size = get("weight.nested_absmax"), int(state.get("nested_blocksize", 256))
        maxima = get("weight.nested_quant_map")[maxima.int()]
        maxima = maxima * nested.repeat_interleave(size)[: len(maxima)] + state["nested_offset"]
    # A block may go over the end of a row.
    blocks = torch.arange(0, 2 * len(pairs), matrix.group) // matrix.span[1]
    codes = torch.stack((pairs >> 4, pairs & 15), -1).reshape(matrix.shape)
    return Parts(codes, maxima[blocks], table=get("weight.quant_map").clone())


def _floats(scales: Tensor) -> Tensor:
    """Return floats as they are, and exponents of powers of two as bfloat16."""
    if scales.is_floating_point() and scales.dtype != torch.float8_e8m0fnu:
        return scales
    return scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def packed_experts(get: Get) -> PackedMatrix:
    """Return the mxfp4 matrices of gpt-oss's experts as one packed matrix."""
    blocks, scales = get("blocks"), _floats(get("scales"))
    codes = torch.empty_like(blocks)
    for pairs, output in zip(blocks, codes, strict=True):
        output.copy_(packed_pairs(_unpacked(pairs.flatten(0, 1), 4)).view_as(output))
    return PackedMatrix(codes.view(-1, codes[0, 0].numel()), scales.reshape(-1, scales.shape[2]), table=FP4.clone())


def _experts(matrix: QuantisedMatrix, get: Get, dtype: torch.dtype) -> Tensor:
    """Return the dequantised mxfp4 matrices of gpt-oss's experts."""
    blocks, scales = get("blocks"), _floats(get("scales"))
    result = torch.empty(matrix.shape, dtype=dtype)
    for pairs, exponents, output in zip(blocks, scales, result, strict=True):
        numbers = FP4[_unpacked(pairs.flatten(1), 4).int()].view(*exponents.shape, -1) * exponents[..., None]
        output.copy_(numbers.flatten(1).T)
    return result


_READERS: Mapping[Layout, Callable[[QuantisedMatrix, Get, Mapping[str, Any]], Parts]] = {
    "awq": _awq,
    "gptq": _gptq,
    "int32": _int32,
    "int8": _int8,
    "fp8": _fp8,
    "fp4": _fp4,
    "bitsandbytes": _bitsandbytes,
}
