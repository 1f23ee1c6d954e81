"""The work lists of attention are made once per step, not once per layer."""

from __future__ import annotations

import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import build_model

from llmsched.engine.executor.base import StepPlan
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.kernels.cpu import ops


@pytest.mark.parametrize(("arch", "windows"), [("llama", {None}), ("gemma2", {None, 8})])
@pytest.mark.parametrize("model_impl", ["fused", "transformers"])
def test_layers_share_work(
    arch: str, windows: set[int | None], model_impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_blocks": 16, "block_size": 4, "device": "cpu", "kv_dtype": torch.float32}
    executor = TorchExecutor(build_model(arch, seed=3), model_impl=model_impl, **settings)  # type: ignore[arg-type]
    made: list[int | None] = []
    right = ops.list_work
    monkeypatch.setattr(
        ops, "list_work", lambda *lengths, window: made.append(window) or right(*lengths, window=window)
    )
    stepper = Stepper(executor, [make_sequence("0", list(range(4, 24)))], 40)
    executor.execute(StepPlan([row for _, row in stepper.rows([20])]))
    assert sorted(made, key=str) == sorted(windows, key=str)
