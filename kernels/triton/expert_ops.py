"""CUDA ops of mixtures of experts, which launch Triton kernels and do not wait for the device.

Shapes of launches and memory depend only on the number of tokens and on the model, not on the chosen experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from llmsched.kernels.activations import Activation
from llmsched.kernels.experts import Gate, Matrices, Routing, count_experts
from llmsched.kernels.triton.experts import expert_kernel, order_kernel, route_kernel
from llmsched.kernels.triton.packed_products import integer_codes

#: Pairs that the ordering kernel reads at a time.
ORDER_BLOCK = 1024
#: Pairs per expert, on average, up to which blocks are small.
FEW_PAIRS = 8


class ExpertTiling(NamedTuple):
    block_m: int  # pairs
    block_n: int  # columns of the product
    block_k: int  # numbers of a row that are multiplied at a time
    num_warps: int
    num_stages: int


def choose_expert_tiling(num_pairs: int, num_experts: int, item_size: int, ordered: bool = False) -> ExpertTiling:
    """Choose the tile sizes of the products of all experts. `item_size` is the bytes of one number.

    `ordered` is True if columns have an order, which takes more registers.
    """
    # Only two variants per model, so that a step of one token and a step of most tokens compile both.
    few = num_pairs <= FEW_PAIRS * num_experts
    if item_size == 4:  # full float32 products run on CUDA cores, not tensor cores, and read registers
        return ExpertTiling(16 if few else 32, 64, 32, num_warps=4, num_stages=1)
    return (
        ExpertTiling(16, 64, 64, num_warps=4, num_stages=4)
        if few
        else ExpertTiling(64, 128, 64, 8 if ordered else 4, 3)
    )


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    tokens, num_experts = logits.shape
    experts = torch.empty(tokens, routing.chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.chosen, dtype=torch.float32, device=logits.device)
    if tokens:
        size = num_experts // routing.groups
        route_kernel[(tokens,)](
            logits,
            weights if correction is None else correction,
            experts,
            weights,
            routing.factor,
            GROUPS=routing.groups,
            SIZE=size,
            CHOSEN=routing.chosen,
            CHOSEN_GROUPS=routing.chosen_groups,
            GROUP_BEST=routing.group_best,
            SIGMOID=routing.score == "sigmoid",
            NORMALISED=routing.normalised,
            CORRECTED=correction is not None,
            BLOCK_G=power_of_two(routing.groups),
            BLOCK_S=power_of_two(size),
            BLOCK_C=power_of_two(routing.chosen),
            num_warps=1 if num_experts <= 128 else 4,
        )
    return experts, weights


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
    tokens, chosen = experts.shape
    num_experts, num_pairs = count_experts(down, rows.shape[1]), tokens * chosen
    if not num_pairs:
        return torch.empty_like(rows)
    order = torch.empty(num_pairs, dtype=torch.int32, device=rows.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=rows.device)
    order_kernel[(num_experts,)](experts, order, starts, num_pairs, BLOCK=ORDER_BLOCK)
    places = order, starts, weights
    inner = _product(rows, up, up_bias, *places, gate)
    outer = _product(inner, down, down_bias, *places, None)
    return outer.view(tokens, chosen, -1).sum(dim=1)


def _product(
    rows: Tensor,
    matrices: Matrices,
    biases: Tensor | None,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    gate: Gate | None,
) -> Tensor:
    """Return the products of all experts, the first ones if `gate` is given, else the second ones."""
    num_pairs, num_experts, (*_, size) = len(order), len(starts) - 1, matrices.shape
    packed = None if isinstance(matrices, Tensor) else matrices
    numbers, coding = (matrices, 0) if isinstance(matrices, Tensor) else integer_codes(matrices)
    numbers = numbers.view(num_experts, -1, numbers.shape[-1])
    width = numbers.shape[1]
    output = rows.new_empty(num_pairs, width if gate is None else width // 2)
    ordered = packed is not None and packed.order is not None
    tiling = choose_expert_tiling(num_pairs, num_experts, rows.element_size(), ordered)
    blocks = num_pairs // tiling.block_m + min(num_pairs, num_experts)  # each expert has at most one that is not full
    rule = gate or Gate()
    expert_kernel[(blocks * -(-width // tiling.block_n),)](
        rows,
        numbers,
        *(packed or (None,) * 5)[1:5],
        biases,
        order,
        starts,
        weights,
        output,
        *numbers.stride(),
        rule.slope,
        rule.limit,
        rule.shift,
        EXPERTS=num_experts,
        WIDTH=width,
        SIZE=size,
        CHOSEN=weights.shape[1],
        GATED=gate is not None,
        INTERLEAVED=rule.interleaved,
        ACTIVATION=get_args(Activation).index(rule.activation),
        LIMITED=rule.limit < math.inf,
        CODING=coding,
        PER_BYTE=0 if packed is None else 8 // packed.bits,
        GROUP=1 if packed is None else size // packed.scales.shape[1],
        BLOCK_E=power_of_two(num_experts),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    return output


def power_of_two(size: int) -> int:
    """Round `size` up to a power of two."""
    return 1 << (size - 1).bit_length()
