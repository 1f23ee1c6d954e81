"""Recordings repeat kernels and torch's operations on the same memory."""

from __future__ import annotations

import pytest
import torch
from layers import normal
from torch import Tensor

from llmsched.kernels.cpu import ops
from llmsched.kernels.cpu.recording import NotRecordableError, Recording


def layers(rows: Tensor, residual: Tensor) -> Tensor:
    """Compute with kernels, views, operations in place, and operations that return new tensors."""
    weight = torch.ones(rows.shape[1])
    for number in range(6):
        normed = ops.add_norm(residual, rows * number, weight, eps=1e-5)
        gate_up = torch.cat([normed, normed.flip(1)], 1)
        rows = ops.gated(gate_up, "silu").view_as(rows)
        rows[:, :3] += 1
        first, second = rows.chunk(2, 1)
        rows = torch.cat([second, first * 0.5], 1)
    return rows


def test_a_replay_computes_new_inputs() -> None:
    with torch.inference_mode():
        rows, residual = normal(3, 64), normal(3, 64, seed=2)
        recording = Recording()
        with recording:
            found = layers(rows, residual)
        for seed in (3, 4):
            rows.copy_(normal(3, 64, seed=seed))
            residual.copy_(normal(3, 64, seed=9))
            expected = layers(rows.clone(), residual.clone())
            recording.replay()
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("recorded", "replayed"), [(2, 1), (1, 2)])
def test_a_replay_runs_on_as_many_threads_as_torch_has_now(recorded: int, replayed: int) -> None:
    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            torch.set_num_threads(recorded)
            with Recording() as recording:
                rows = torch.zeros(64, 512)
                found = ops.gated(rows, "silu")
            torch.set_num_threads(replayed)
            rows.copy_(normal(64, 512))
            recording.replay()
            assert torch.equal(found, ops.gated(rows, "silu"))
    finally:
        torch.set_num_threads(before)


def test_memory_that_the_work_frees_is_used_again() -> None:
    with torch.inference_mode(), Recording() as recording:
        layers(normal(3, 64), normal(3, 64, seed=2))
    assert len(recording._memory) < 16  # of 36 tensors


def test_values_for_the_host_cannot_be_recorded() -> None:
    with torch.inference_mode(), pytest.raises(NotRecordableError, match="returns values to the host"), Recording():
        normal(3).max().item()
