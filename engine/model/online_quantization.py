"""Rounding of an unquantised checkpoint's matrices to packed matrices, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmsched.engine.architecture.online_formats import OnlineFormat, format_of
from llmsched.engine.architecture.quantised_layouts import expert_matrix
from llmsched.engine.errors import ModelError
from llmsched.engine.model.checkpoint import LazyTensor, StateDict, placeholder
from llmsched.engine.model.quantised_weights import stacked_experts
from llmsched.kernels.packed_matrix import PackedMatrix, packed_pairs

#: Numbers of a matrix that are rounded at a time.
TILE_NUMBERS = 1 << 24
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def quantised_state_dict(
    state: StateDict,
    quantization: str,
    packed_matrices: dict[str, PackedMatrix],
    dtype: torch.dtype,
    model_type: str | None = None,
) -> StateDict:
    """Return a mapping whose reads round the matrices of `state` and add the results to `packed_matrices`.

    The read of a rounded matrix returns a placeholder of the type `dtype`, which has the right shape but takes no
    memory. Matrices of single experts are joined. Raises ModelError, when a matrix is read, if it has numbers that are
    not finite.
    """

    def rounded(name: str) -> PackedMatrix | Tensor:
        values = state[name].read()
        if (chosen := format_of(name, values.shape, quantization, model_type)) is None:
            return values
        matrix = quantised(values.flatten(0, -2), chosen)
        if not all(part.isfinite().all() for part in (matrix.scales, matrix.offsets) if part is not None):
            raise ModelError(f"{name} has numbers that are not finite, and cannot be rounded to {chosen.name}")
        return matrix

    def single(name: str) -> LazyTensor:
        def read() -> Tensor:
            found = rounded(name)
            if isinstance(found, Tensor):
                return found
            packed_matrices[name] = found
            return placeholder(state[name].shape or found.shape, dtype)

        return LazyTensor(read)

    def joined(target: str, members: Sequence[str], count: int) -> LazyTensor:
        def read() -> Tensor:
            matrices = [matrix for name in members if isinstance(matrix := rounded(name), PackedMatrix)]
            packed_matrices[target] = matrix = stacked_experts(matrices, count)
            return placeholder((count, matrix.shape[0] // count, matrix.shape[1]), dtype)

        return LazyTensor(read)

    experts: dict[str, list[tuple[int, str, str]]] = {}
    for name, tensor in state.items():
        place = expert_matrix(name, model_type)
        if place is not None and format_of(name, tensor.shape, quantization, model_type):
            experts.setdefault(place.target, []).append((place.number, place.role, name))
    in_joined = {name for members in experts.values() for *_, name in members}
    result = {name: single(name) for name in state if name not in in_joined}
    for target, members in experts.items():
        result[target] = joined(target, [name for *_, name in sorted(members)], len({number for number, *_ in members}))
    return result


def quantised(values: Tensor, chosen: OnlineFormat) -> PackedMatrix:
    """Round a matrix [M, N] to the nearest numbers of a format."""
    rows = max(1, TILE_NUMBERS // values.shape[1])
    round_tile = {"fp8": _to_fp8, "int8": _to_int8, "int4": _to_int4}[chosen.name]
    size = chosen.group or values.shape[1]
    tiles = [round_tile(tile.float().view(len(tile), -1, size)) for tile in torch.split(values, rows)]
    codes, scales, *offsets = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return PackedMatrix(codes, scales, *offsets)


def _to_int8(groups: Tensor) -> tuple[Tensor, ...]:
    scales = (groups.abs().amax(2, keepdim=True) / 127).bfloat16()
    codes = (groups / _divisor(scales)).round().clamp(-127, 127).to(torch.int8)
    return codes.flatten(1), scales.flatten(1)


def _to_fp8(groups: Tensor) -> tuple[Tensor, ...]:
    scales = groups.abs().amax(2, keepdim=True) / _LARGEST_FP8
    codes = (groups / _divisor(scales)).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    return codes.flatten(1), scales.flatten(1)


def _to_int4(groups: Tensor) -> tuple[Tensor, ...]:
    """Round to 16 numbers at equal distances from the smallest to the largest number of each group."""
    least, largest = groups.aminmax(dim=2, keepdim=True)
    scales, offsets = ((largest - least) / 15).bfloat16(), least.bfloat16()
    codes = ((groups - offsets.float()) / _divisor(scales)).round().clamp(0, 15).to(torch.uint8)
    return packed_pairs(codes.flatten(1)), scales.flatten(1), offsets.flatten(1)


def _divisor(scales: Tensor) -> Tensor:
    # Codes are chosen for scales as they are kept, after rounding.
    return torch.where(scales > 0, scales.float(), 1)
