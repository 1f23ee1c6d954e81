"""Mixture of experts: rules of routers and experts, and the specification of their ops in plain torch.

Each of T tokens is sent to C of E experts, which makes T x C pairs of a token and an expert. Pair p belongs to token
p // C.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsched.kernels.activations import ACTIVATIONS, Activation
from llmsched.kernels.packed_matrix import PackedMatrix

#: Matrices of all experts, [E, M, N] with any strides, or one packed matrix [E x M, N].
Matrices = Tensor | PackedMatrix


class Routing(NamedTuple):
    """Rule by which a router chooses experts for a token.

    An expert's score is its share of the softmax over all logits, or the sigmoid of its logit. The experts with the
    best scores are chosen, and their scores become the weights of their outputs.
    """

    chosen: int  # experts per token
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # True if the weights of a token are divided by their sum
    factor: float = 1.0  # of all weights
    groups: int = 1  # groups of neighbouring experts, all of the same size
    chosen_groups: int = 1  # groups of which a token may use experts
    group_best: int = 1  # the score of a group is the sum of so many best scores of its experts


class Gate(NamedTuple):
    """Way in which the halves gate and up of an expert's first product become the input of the second product.

    The input is activation(slope x gate) / slope x (up + shift), where gate is first limited to `limit`, and up to the
    range from -limit to limit. gpt-oss uses these three parameters.
    """

    activation: Activation = "silu"
    interleaved: bool = False  # True if numbers of gate and up alternate; False if gate comes first
    slope: float = 1.0
    limit: float = math.inf
    shift: float = 0.0


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts for T tokens. Return their numbers, int32 [T, C], and the weights of their outputs, float32.

    - logits: [T, E].
    - correction: float32 [E]. It is added to the scores by which experts and groups are chosen, but not to the weights
      (DeepSeek-V3).

    If scores are equal, torch.topk decides. Scores are computed in float32.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(dim=1)
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        groups = ranked.view(len(ranked), routing.groups, -1)
        best = groups.topk(routing.group_best, dim=2).values.sum(2)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(routing.chosen_groups, dim=1).indices, True)
        ranked = groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    experts = ranked.topk(routing.chosen, dim=1).indices
    weights = scores.gather(1, experts)
    if routing.normalised:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)  # all sigmoids may be 0
    return experts.int(), weights * routing.factor


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
    """Compute the MLPs of the chosen experts. Return the weighted sum of their outputs for each token, [T, N].

    - rows: [T, N].
    - experts, weights: [T, C], as `route` returns them. No token has an expert twice.
    - up: [E, 2 M, N]. An expert's first product is row @ up.T + bias; it has gate and up (see Gate).
    - down: [E, N, M], for the second product.
    - up_bias: [E, 2 M]. down_bias: [E, N].

    The products of a token are added in float32, always in the same order.
    """
    output = torch.zeros_like(rows, dtype=torch.float32)
    count = count_experts(down, rows.shape[1])
    for expert in range(count):
        tokens, places = (experts == expert).nonzero(as_tuple=True)
        first, second = (
            found if isinstance(found, Tensor) else found.unpacked().to(rows.dtype)
            for found in (matrix_of(matrices, expert, count) for matrices in (up, down))
        )
        inner = F.linear(rows[tokens], first, None if up_bias is None else up_bias[expert])
        outer = F.linear(join(inner, gate), second, None if down_bias is None else down_bias[expert])
        output[tokens] += outer.float() * weights[tokens, places, None]
    return output.to(rows.dtype)


def count_experts(down: Matrices, size: int) -> int:
    """Return the number of experts, whose second products have `size` numbers."""
    return len(down) if isinstance(down, Tensor) else down.shape[0] // size


def matrix_of(matrices: Matrices, expert: int, count: int) -> Matrices:
    """Return the matrix of one of `count` experts, [M, N]."""
    if isinstance(matrices, Tensor):
        return matrices[expert]
    rows = matrices.shape[0] // count
    own = matrices.rows(slice(expert * rows, (expert + 1) * rows))
    return own if own.order is None else own._replace(order=own.order[expert])


def join(rows: Tensor, gate: Gate) -> Tensor:
    """Join the halves gate and up of each row of `rows` [T, 2 M] as `gate` says. Return [T, M]."""
    wide = rows.float()
    left, right = (wide[:, ::2], wide[:, 1::2]) if gate.interleaved else wide.chunk(2, dim=1)
    left, right = left.clamp(max=gate.limit), right.clamp(-gate.limit, gate.limit)
    joined = ACTIVATIONS[gate.activation](gate.slope * left) / gate.slope * (right + gate.shift)
    return joined.to(rows.dtype)
