"""LoRA products: the reference against their definition, and the CPU's against the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lora_products import PRODUCTS, lora_difference, random_products

from llmsched.kernels import reference
from llmsched.kernels.cpu import ops


@pytest.mark.parametrize("name", PRODUCTS)
def test_reference_adds_the_product_of_each_tokens_own_matrices(name: str) -> None:
    case = PRODUCTS[name]
    output, rows, matrices = random_products(case, torch.float32)
    found = output.clone()
    reference.add_lora(found, rows, matrices, torch.tensor(case.adapters))
    for token, adapter in enumerate(case.adapters):
        expected = output[token].clone()
        column = 0
        for span, (first, width) in enumerate(case.spans if adapter >= 0 else ()):
            a = matrices.a[adapter, span * case.rank : (span + 1) * case.rank]
            expected[first : first + width] += matrices.b[adapter, :, column : column + width].T @ (a @ rows[token])
            column += width
        torch.testing.assert_close(found[token], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    assert lora_difference(ops, name, dtype) <= (1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps)


def test_a_wrong_adapter_would_be_seen() -> None:
    def shifted(adapters: Any, num_adapters: int, put: Any) -> Any:
        return ops.prepare_lora(np.where(adapters < 0, -1, (adapters + 1) % num_adapters), num_adapters, put)

    wrong = SimpleNamespace(prepare_lora=shifted, add_lora=ops.add_lora)
    assert lora_difference(wrong, "decodes", torch.float32) > 0.1
    assert lora_difference(wrong, "chunks", torch.float32) > 0.1
