"""LoRA products of random adapters, compared with the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from layers import normal

from llmsched.kernels import reference
from llmsched.kernels.lora import LoraMatrices


class Products(NamedTuple):
    adapters: tuple[int, ...]  # of the tokens
    rank: int
    size: int
    spans: tuple[tuple[int, int], ...]
    num_outputs: int
    num_adapters: int = 3


MIXED = (1, -1, 0, 2, -1, -1, 0, 1)
PRODUCTS = {
    "decodes": Products(MIXED, 8, 48, ((0, 80),), 80),
    "one token": Products((2,), 1, 40, ((0, 5),), 5),
    "no adapter": Products((-1, -1), 8, 48, ((0, 80),), 80),
    "spans": Products(MIXED, 8, 48, ((0, 96), (96, 24), (120, 24)), 144),
    "a span is not adapted": Products(MIXED, 5, 48, ((0, 96), (120, 24)), 150),
    "chunks": Products((*(0,) * 40, -1, 1, 1, *(2,) * 17, *(0,) * 3), 16, 72, ((3, 70), (90, 70)), 160),
    "long rows": Products(MIXED, 20, 700, ((0, 130),), 130),
    "large ranks": Products((0, 0, 1), 96, 48, ((0, 65), (65, 7)), 72, 2),
    "many adapters": Products(tuple(range(-1, 12)), 4, 48, ((0, 40),), 40, 12),
}


def random_products(case: Products, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, LoraMatrices]:
    """Return the output before the addition, the rows, and the matrices. The last adapter has a smaller rank."""
    width = sum(count for _, count in case.spans)
    a = normal(case.num_adapters, len(case.spans) * case.rank, case.size, seed=1) / case.size**0.5
    b = normal(case.num_adapters, case.rank, width, seed=2) / case.rank**0.5
    b[-1, case.rank // 2 + 1 :] = 0
    a[-1].view(len(case.spans), case.rank, -1)[:, case.rank // 2 + 1 :] = 0
    output, rows = (normal(len(case.adapters), size, seed=size) for size in (case.num_outputs, case.size))
    return output.to(dtype), rows.to(dtype), LoraMatrices(a.to(dtype), b.to(dtype), case.spans)


def lora_difference(module: Any, name: str, dtype: torch.dtype) -> float:
    """Return the largest difference between the ops of `module` and the reference."""
    case = PRODUCTS[name]
    output, rows, matrices = random_products(case, dtype)
    results = []
    for ops in (module, reference):
        found, adapters = output.clone(), np.array(case.adapters, np.int32)
        work = ops.prepare_lora(adapters, case.num_adapters, lambda array: torch.from_numpy(array.copy()))
        ops.add_lora(found, rows, matrices, work)
        results.append(found.float())
    untouched = torch.tensor(case.adapters) < 0
    assert torch.equal(results[0][untouched], output[untouched].float())
    return float((results[0] - results[1]).abs().max())
