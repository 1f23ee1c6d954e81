"""CUDA graphs without a GPU: passes are computed again from the same tensors, whose old contents are poison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmsched.engine.executor.buffers import StepBuffers
from llmsched.engine.executor.torch_executor import TorchExecutor

#: Byte whose repetition is no valid token id, slot or block id.
POISON = 0x7F


class PoisonedBuffers(StepBuffers):
    """StepBuffers in which nothing is left of earlier steps."""

    def begin(self) -> None:
        super().begin()
        self._hosts[self._turn].fill_(POISON)

    def upload(self) -> None:
        self._block.fill_(POISON)
        super().upload()


class FakeRecorder:
    """Recorder whose replays compute the pass again. `replays` has the number of rows of each replay."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], None]:
        output = run()

        def replay() -> None:
            self.replays.append(len(output))
            output.fill_(float("nan"))
            run()

        return replay


def capture_fake_graphs(
    executor: TorchExecutor, max_rows: int, max_model_len: int, buffers: type[StepBuffers] = PoisonedBuffers
) -> FakeRecorder:
    """Let the executor run decodes of up to `max_rows` rows as fake graphs with poisoned memory."""
    recorder = FakeRecorder()
    executor._buffers = buffers(executor.device, 1 << 16)
    assert executor.capture(max_rows, max_model_len, record=recorder) is not None
    graphs = executor._graphs
    assert graphs is not None
    set_tables = graphs._set_tables

    def poison_and_set(inputs: Any) -> None:
        graphs._tables.fill_(POISON << 24)
        set_tables(inputs)

    graphs._set_tables = poison_and_set  # type: ignore[method-assign]
    recorder.replays.clear()
    executor.recorder = recorder  # type: ignore[attr-defined]
    return recorder
