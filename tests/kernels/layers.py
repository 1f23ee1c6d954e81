"""Random inputs of the ops between a layer's matrix products, for the tests of every backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NORM_CASES = ("plain", "branch", "branch with norm", "LayerNorm", "LayerNorm without bias")


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(*size, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def norm_difference(module: Any, expected: Any, case: str, tokens: int, size: int, dtype: torch.dtype) -> float:
    """Return the greatest difference of `add_norm` of two modules, in result and residual."""
    weight, branch = normal(size, seed=1, dtype=dtype), normal(tokens, size, seed=2, dtype=dtype)
    branch_weight = normal(size, seed=3, dtype=dtype) if case == "branch with norm" else None
    bias = normal(size, seed=5, dtype=dtype) if case == "LayerNorm" else None
    found = []
    for ops in (module, expected):
        residual = normal(tokens, size, seed=4, dtype=dtype)
        options = {"eps": 1e-5, "offset": 1.0 if branch_weight is not None else 0.0, "branch_weight": branch_weight}
        options["centred"] = case.startswith("LayerNorm")
        normed = ops.add_norm(residual, None if case == "plain" else branch, weight, bias, **options)
        found.append(torch.stack([normed, residual]).float())
    return float((found[0] - found[1]).abs().max())


#: Cases of `rotary_difference`: rotated numbers of a head's 20, whether heads are normalised, and other options.
ROTARY_CASES: dict[str, tuple[int, bool, dict[str, bool]]] = {
    "all": (20, False, {}),
    "with norm": (20, True, {}),
    "partial by group": (12, False, {"by_group": True}),
    "partial with norm": (12, True, {}),
    "none by group": (0, False, {"by_group": True}),
    "neighbours with norm": (20, True, {"neighbours": True}),
    "partial neighbours": (12, False, {"neighbours": True}),
    "norm last": (20, True, {"norm_last": True}),
    "partial neighbours, norm last": (12, True, {"neighbours": True, "norm_last": True}),
}


def rotary_difference(
    module: Any, expected: Any, case: str, tokens: int, dtype: torch.dtype, cached: torch.dtype, head_dim: int = 20
) -> float:
    """Return the greatest difference of `rotate_and_write` of two modules, in the queries and in the caches."""
    rotated, norm, others = ROTARY_CASES[case]
    heads, kv_heads, block_size = 6, 2, 4
    projected = normal(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    angles = normal(tokens, rotated, seed=1)
    weights = {
        "query_weight": normal(head_dim, seed=2, dtype=dtype),
        "key_weight": normal(head_dim, seed=3, dtype=dtype),
    }
    options: dict[str, Any] = others | ({"eps": 1e-6, "offset": 1.0, **weights} if norm else {})
    blocks = -(-tokens // block_size) + 1
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(4), device="cpu")[:tokens]
    slots = slots.to(torch.get_default_device())
    slots[tokens // 2] = -1
    if cached.itemsize == 1:  # one head's largest numbers are cut off
        options["kv_scales"] = torch.tensor([[2.0**-9, 0.5], [1.0, 2.0**-9]])
    found = []
    for ops in (module, expected):
        caches = [normal(blocks, kv_heads, block_size, head_dim, seed=5).to(cached) for _ in range(2)]
        tables = (angles.cos().to(dtype), angles.sin().to(dtype))
        query = ops.rotate_and_write(projected, *tables, *caches, slots, **options)
        found.append(torch.cat([part.float().flatten() for part in (query, *caches)]))
    return float((found[0] - found[1]).abs().max())


def gate_difference(module: Any, expected: Any, tokens: int, size: int, dtype: torch.dtype, activation: str) -> float:
    """Return the greatest difference of `gated` and `activated` of two modules, relative to the size of its result."""
    gate_up = 3 * normal(tokens, 2 * size, dtype=dtype)
    gate_up[0, :3] = torch.tensor([-90.0, 90.0, 0.0])  # exp of these would overflow
    differences = []
    for name in ("gated", "activated"):
        found, wanted = (getattr(ops, name)(gate_up, activation).float() for ops in (module, expected))
        differences.append(float(((found - wanted).abs() / (1 + wanted.abs())).max()))
    return max(differences)
