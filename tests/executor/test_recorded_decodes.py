"""Recorded passes compute the same logits as the passes that were not recorded, and only where they can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepping import Stepper, make_sequence
from tiny_models import build_model

from llmsched.engine.executor import recorded_decodes
from llmsched.engine.executor.recorded_decodes import MAX_ROWS, RecordedDecodes
from llmsched.engine.executor.torch_executor import TorchExecutor

LENGTH = 600


def make_executor(arch: str, dtype: torch.dtype, **options: Any) -> TorchExecutor:
    model = build_model(arch, seed=5, max_position_embeddings=1024, **options).to(dtype)
    return TorchExecutor(model, num_blocks=MAX_ROWS * 152, block_size=4, device="cpu", kv_dtype=dtype)


def all_logits(executor: TorchExecutor, *, record: bool, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Return the logits of steps in which sequences with prompts of these lengths join one after the other."""
    if record:
        executor.capture(MAX_ROWS, LENGTH)
    found: list[torch.Tensor] = []
    executor.on_logits = lambda sequences, logits: found.append(logits.clone())
    prompts = [[(row * 31 + place * 7) % 90 + 4 for place in range(length)] for row, length in enumerate(lengths)]
    stepper = Stepper(executor, [make_sequence(str(row), prompt) for row, prompt in enumerate(prompts)], LENGTH)
    for joined in range(1, len(lengths) + 1):
        stepper.step([600] * joined + [0] * (len(lengths) - joined))
        for _ in range(4):
            stepper.step([1] * joined + [0] * (len(lengths) - joined))
    return found


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("gemma2", torch.float32), ("gpt_neox", torch.bfloat16)],
)
def test_replays_equal_passes_without_recordings(arch: str, dtype: torch.dtype) -> None:
    """Contexts grow from one split of attention to three, and rows join."""
    lengths = (3, 254, 510)
    expected = all_logits(make_executor(arch, dtype), record=False, lengths=lengths)
    executor = make_executor(arch, dtype)
    found = all_logits(executor, record=True, lengths=lengths)
    assert all(map(torch.equal, found, expected))
    assert isinstance(executor._graphs, RecordedDecodes)
    assert sorted(rows for rows, _ in executor._graphs._recorded) == [1, 2, 3]


def test_steps_with_long_contexts_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_decodes, "MAX_CONTEXT", 256)
    expected = all_logits(make_executor("llama", torch.float32), record=False, lengths=(254, 510))
    executor = make_executor("llama", torch.float32)
    assert all(map(torch.equal, all_logits(executor, record=True, lengths=(254, 510)), expected))
    assert isinstance(executor._graphs, RecordedDecodes)
    assert executor._graphs._tables.shape[2] == 256 // executor.block_size
    assert [rows for rows, _ in executor._graphs._recorded] == [1]


def test_steps_with_many_decodes_are_not_recorded() -> None:
    executor = make_executor("llama", torch.float32)
    executor.capture(MAX_ROWS + 1, LENGTH)
    executor.execute(executor.rehearsal([(5, 1)] * (MAX_ROWS + 1)))
    executor.execute(executor.rehearsal([(5, 1), (5, 3)]))
    assert isinstance(executor._graphs, RecordedDecodes)
    assert not executor._graphs._recorded


def test_a_mixture_of_experts_is_not_recorded() -> None:
    executor = make_executor("qwen3_moe", torch.float32)
    executor.capture(1, LENGTH)
    assert executor._graphs is None


def test_a_pass_that_needs_values_on_the_host_runs_without_recordings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = make_executor("llama", torch.float32)
    expected = all_logits(executor, record=False, lengths=(3,))
    forward = executor._model.forward
    monkeypatch.setattr(executor._model, "forward", lambda *args: forward(*args) * float(args[0].max() >= 0))
    found = all_logits(executor, record=True, lengths=(3,))
    assert all(map(torch.equal, found, expected))
    (warning,) = caplog.messages
    assert warning.startswith("decodes run without recordings")
