"""Random inputs of the ops of mixtures of experts, for the tests of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from layers import normal
from torch import Tensor

from llmsched.kernels.experts import Gate, Routing
from llmsched.kernels.packed_matrix import PackedMatrix

#: Name -> (number of experts, rule, whether a correction is added to the scores).
ROUTINGS: dict[str, tuple[int, Routing, bool]] = {
    "softmax": (24, Routing(4), False),
    "softmax, not normalised": (8, Routing(2, normalised=False), False),
    "one expert": (5, Routing(1), False),
    "all experts": (3, Routing(3), False),
    "sigmoid with correction": (16, Routing(3, "sigmoid", factor=2.5), True),
    "groups by two best": (32, Routing(6, "sigmoid", True, 2.5, 4, 2, 2), True),
    "groups by the best": (40, Routing(5, "softmax", False, 16.0, 8, 3, 1), False),
}


@dataclass(frozen=True)
class Mixture:
    """Sizes and options of `run_experts`."""

    tokens: int = 9
    num_experts: int = 6
    chosen: int = 2
    hidden: int = 48
    inner: int = 40
    gate: Gate = Gate()
    biases: bool = False
    transposed: bool = False
    packed: Literal["mxfp4", "int4", "fp8", ""] = ""  # kind of the matrices, if they are packed
    ordered: bool = False  # True if the columns of each packed expert have an order of their own
    choice: Literal["random", "first", "apart"] = "random"  # experts 0 to C - 1, or none that another token has


OSS = Gate(interleaved=True, slope=1.702, limit=1.5, shift=1.0)
MIXTURES: dict[str, Mixture] = {
    "random": Mixture(),
    "gelu": Mixture(gate=Gate("gelu_tanh")),
    "gpt-oss": Mixture(gate=OSS, biases=True, transposed=True),
    "biases": Mixture(biases=True),
    "one token": Mixture(tokens=1, num_experts=64, chosen=4),
    "one expert has all tokens": Mixture(tokens=70, num_experts=64, chosen=1, choice="first"),
    "each expert has all tokens": Mixture(tokens=20, num_experts=3, chosen=3, choice="first"),
    "experts of one token each": Mixture(tokens=7, num_experts=90, chosen=4, choice="apart"),
    "packed mxfp4": Mixture(hidden=64, inner=96, gate=OSS, biases=True, packed="mxfp4"),
    "packed int4": Mixture(tokens=150, num_experts=4, hidden=96, inner=64, packed="int4"),
    "packed int4 in order": Mixture(tokens=20, hidden=96, inner=64, packed="int4", ordered=True),
    "packed fp8": Mixture(hidden=128, inner=32, packed="fp8"),
    "many tokens": Mixture(tokens=150, num_experts=4, hidden=72, inner=100),
}


def routing_difference(module: Any, expected: Any, case: str, tokens: int, dtype: torch.dtype) -> float:
    """Return the greatest difference of the weights of all experts between `route` of two modules."""
    num_experts, routing, corrected = ROUTINGS[case]
    order = normal(tokens, num_experts).argsort(dim=1)
    logits = torch.linspace(-4, 4, num_experts, dtype=dtype, device=order.device)[order]  # none are equal
    correction = 0.3 * normal(num_experts, seed=1) if corrected else None
    found = [dense_weights(*ops.route(logits, routing, correction), num_experts) for ops in (module, expected)]
    return float((found[0] - found[1]).abs().max()) / routing.factor


def dense_weights(experts: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Return the weight of each expert for each token, [T, E], with zeros for experts that are not chosen."""
    assert experts.dtype == torch.int32
    assert weights.dtype == torch.float32
    return weights.new_zeros(len(weights), num_experts).scatter_(1, experts.long(), weights)


def random_packed(num_rows: int, size: int, kind: str) -> PackedMatrix:
    """Return a packed matrix with random codes and scales; mxfp4 has a table, int4 offsets."""
    bits, group = (8, size) if kind == "fp8" else (4, 32)
    numbers = normal(num_rows, size * bits // 8, seed=num_rows)
    codes = numbers.to(torch.float8_e4m3fn) if kind == "fp8" else (40 * numbers).int().to(torch.uint8)
    scales = 0.01 + 0.01 * normal(num_rows, size // group, seed=size).abs()
    table = normal(16) if kind == "mxfp4" else None
    if kind == "fp8":
        return PackedMatrix(codes, scales)
    return PackedMatrix(codes, scales.bfloat16(), None if kind == "mxfp4" else -8 * scales, table)


def inputs(case: Mixture, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return tensors and options of `run_experts`."""
    tokens, count, hidden, inner = case.tokens, case.num_experts, case.hidden, case.inner
    rows = normal(tokens, hidden, dtype=dtype)
    up: Any
    down: Any
    up, down = normal(count, 2 * inner, hidden, seed=1) / 8, normal(count, hidden, inner, seed=2) / 8
    up, down = up.to(dtype), down.to(dtype)
    if case.packed:
        up, down = (
            random_packed(count * size, width, case.packed) for size, width in ((2 * inner, hidden), (hidden, inner))
        )
    if case.ordered:
        up, down = (each._replace(order=normal(count, each.shape[1], seed=7).argsort(dim=1)) for each in (up, down))
    if case.transposed:
        up, down = (weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in (up, down))
    experts = normal(tokens, count, seed=3).argsort(dim=1)[:, : case.chosen].int()
    if case.choice == "first":
        experts = torch.arange(case.chosen, dtype=torch.int32, device=rows.device).repeat(tokens, 1)
    elif case.choice == "apart":
        experts = torch.arange(tokens * case.chosen, dtype=torch.int32, device=rows.device).view(tokens, -1) * 3 + 1
    options: dict[str, Any] = {"gate": case.gate}
    if case.biases:
        options |= {"up_bias": normal(count, 2 * inner, seed=4, dtype=dtype)}
        options |= {"down_bias": normal(count, hidden, seed=5, dtype=dtype)}
    return (rows, experts.contiguous(), normal(tokens, case.chosen, seed=6), up, down), options


def mixture_difference(module: Any, expected: Any, case: str, dtype: torch.dtype) -> float:
    """Return the greatest difference of `run_experts` of two modules, relative to the size of its result.

    The expected result is computed in float32.
    """
    tensors, options = inputs(MIXTURES[case], dtype)
    wide = [each.float() if isinstance(each, Tensor) and each.dtype == dtype else each for each in tensors]
    biases = {name: each.float() for name, each in options.items() if name != "gate"}
    found = module.run_experts(*tensors, **options)
    assert found.dtype == dtype
    wanted = expected.run_experts(*wide, gate=options["gate"], **biases)
    return float(((found.float() - wanted).abs() / (1 + wanted.abs())).max())
