"""Launches of Triton kernels in a captured pass: they wait for nothing, and are the same for all contexts.

Kernels are not run. Their results would not matter: a launch must not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from fake_graphs import PoisonedBuffers
from stepping import make_sequence
from tiny_models import ARCHITECTURES, build_model

from llmsched.engine.executor.base import ScheduledRow
from llmsched.engine.executor.graphs import DecodeGraphs, ModelInputs
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.kernels import dispatch
from llmsched.kernels.triton import expert_ops, ops
from llmsched.kernels.triton import launches as attention
from llmsched.kernels.triton.tiling import Gpu, Join

MODULES = (attention, ops, expert_ops)
KERNELS = [(module, name) for module in MODULES for name in vars(module) if name.endswith("_kernel")]
#: Architectures that only the fused decoder computes.
FUSED = ("bloom", "mpt", "falcon", "falcon_alibi", "falcon_new", "stablelm")
CASES = [(arch, impl) for arch in ARCHITECTURES for impl in ("auto", "transformers")[: 1 + (arch not in FUSED)]]
LENGTH, SIZE = 512, 4

Launches = list[tuple[Any, ...]]


class Kernel:
    """Kernel that notes its launches: name, grid, and arguments. Of a tensor it notes shape, strides and type."""

    def __init__(self, name: str, launches: Launches) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            noted = [
                (tuple(each.shape), each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each
                for each in arguments
            ]
            self.launches.append((self.name, grid, *noted, constants))

        return launch


def decodes(contexts: list[int]) -> list[ScheduledRow]:
    """Return one row of one token for each context length."""
    table = np.arange(LENGTH // 4, dtype=np.int32)[None]
    return [
        ScheduledRow(make_sequence(str(i), [5] * context), context - 1, 1, table, sample=True)
        for i, context in enumerate(contexts)
    ]


@pytest.mark.parametrize(("arch", "impl"), CASES)
def test_launches_are_the_same_for_all_contexts(arch: str, impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(arch, seed=5)
    sizes = {"num_blocks": LENGTH // 4, "block_size": 4, "kv_dtype": torch.float32}
    executor = TorchExecutor(model, **sizes, device="cpu", model_impl=impl)
    launches: Launches = []
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Kernel(name, launches))
    monkeypatch.setattr(ops, "gpu_properties", lambda _: Gpu(132, 90))
    monkeypatch.setattr(dispatch, "load_backend", lambda _: ops)
    checked_with_joins = []

    def check(_: DecodeGraphs, inputs: ModelInputs) -> None:
        parts = chain(*inputs.context.works)
        works = chain(*(getattr(part, "launches", [part]) for part in parts))  # latent attention has parts
        if any(launch.joins[:, Join.NUM_QUERIES].any() for launch in works):
            checked_with_joins.append(len(inputs.input_ids))

    monkeypatch.setattr(DecodeGraphs, "check", check)
    if executor.model_impl == "fused":
        monkeypatch.setattr(executor._model, "_kernels", ops)
    passes: list[Launches] = []

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def replay() -> None:
            launches.clear()
            run()
            passes.append([*launches])

        run()
        return replay

    executor._buffers = PoisonedBuffers(executor.device, 1 << 16)
    assert executor.capture(SIZE, LENGTH, record=record) is not None
    if any(shape.window is None for shape in executor._model.attention):
        assert checked_with_joins == [4, 2, 1]
    graphs, found = executor._graphs, {}
    assert graphs is not None
    for contexts in ([1, 1, 1, 1], [LENGTH, 3, 1, 80], [300, LENGTH, LENGTH], [7, 7, 7, LENGTH]):
        passes.clear()
        with torch.inference_mode():
            _, inputs = executor._pack(decodes(contexts), SIZE)
            executor._buffers.upload()
            graphs.run(inputs)
        found[tuple(contexts)] = passes[0]
    first = found.pop((1, 1, 1, 1))
    assert {name for name, *_ in first} >= {"attend_kernel"}
    for contexts, other in found.items():
        assert other == first, contexts
