"""Self-test of the compiled kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from llmsched.kernels import self_test
from llmsched.kernels.self_test import kernel_fault


def test_kernels_of_the_cpu_are_right() -> None:
    assert kernel_fault("cpu") is None


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test.dispatch.paged_attention

    def wrong(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return right(*tensors, **options) + 0.5

    monkeypatch.setattr(self_test.dispatch, "paged_attention", wrong)
    assert kernel_fault("cpu") == "attention differs from the reference by 0.5"
