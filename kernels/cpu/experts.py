"""MLPs of a mixture of experts on the CPU: the pairs of tokens and experts are sorted by expert, and each expert with
pairs computes all of them at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llmsched.kernels import experts as reference
from llmsched.kernels.cpu import layer
from llmsched.kernels.cpu.products import linear
from llmsched.kernels.experts import Gate, Matrices, count_experts, matrix_of
from llmsched.kernels.packed_matrix import PackedMatrix

#: Types in which `layer.gated` computes.
_WRITTEN_TYPES = (torch.float32, torch.bfloat16)


def run_experts(
    rows: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Matrices,
    down: Matrices,
    *,
    gate: Gate,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    num_chosen, numbers, count = experts.shape[1], experts.numpy().ravel(), count_experts(down, rows.shape[1])
    pairs = torch.from_numpy(numbers.argsort(kind="stable"))
    bounds = np.append(0, np.bincount(numbers, minlength=count).cumsum())
    plain = gate == Gate(gate.activation) and rows.dtype in _WRITTEN_TYPES
    output, factors = torch.zeros_like(rows, dtype=torch.float32), weights.view(-1, 1)
    for expert in np.flatnonzero(np.diff(bounds)).tolist():
        own = pairs[bounds[expert] : bounds[expert + 1]]
        tokens = own // num_chosen
        inner = linear(rows[tokens], _factor(up, expert, count), None if up_bias is None else up_bias[expert])
        inner = layer.gated(inner, gate.activation) if plain else reference.join(inner, gate)
        outer = linear(inner, _factor(down, expert, count), None if down_bias is None else down_bias[expert])
        output.index_add_(0, tokens, outer * factors[own])
    return output.to(rows.dtype)


def _factor(matrices: Matrices, expert: int, count: int) -> Tensor | tuple[PackedMatrix]:
    found = matrix_of(matrices, expert, count)
    return found if isinstance(found, Tensor) else (found,)
