"""Buffers of steps: what is put is what arrives, also while the step before has not been computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from alike import PROMPTS, assert_same
from engines import MAX_GRAPH, generate_all, make_engine, sampling
from fake_graphs import POISON, capture_fake_graphs

from llmsched.engine.executor.base import StepPlan, StepResult
from llmsched.engine.executor.batch import split
from llmsched.engine.executor.buffers import ALIGNMENT, StepBuffers, step_bytes
from llmsched.engine.executor.in_flight import LaunchedStep, SampledTokens
from llmsched.engine.executor.stopwatch import Stopwatch
from llmsched.engine.executor.torch_executor import TorchExecutor

CPU = torch.device("cpu")


def arrays(seed: int) -> list[np.ndarray[Any, Any]]:
    numbers = np.random.default_rng(seed)
    made = [numbers.integers(-9, 9, 5), numbers.integers(-9, 9, (2, 3)).astype(np.int32), np.zeros((0,), np.int64)]
    return [*made, numbers.random((6, 4)), numbers.random((2, 1, 3)).astype(np.float32), numbers.random((4, 6)).T]


@pytest.mark.parametrize("num_bytes", [1 << 12, 100, 1], ids=["all fit", "some fit", "none fits"])
def test_arrays_arrive_as_they_are(num_bytes: int) -> None:
    buffers = StepBuffers(CPU, num_bytes)
    places = []
    for seed in range(5):
        buffers.begin()
        wanted = arrays(seed)
        found = [buffers.put(array) for array in wanted]
        buffers.upload()
        for tensor, array in zip(found, wanted, strict=True):
            assert tensor.numpy().dtype == array.dtype
            assert tensor.is_contiguous()
            np.testing.assert_array_equal(tensor.numpy(), array)
            assert tensor.data_ptr() % ALIGNMENT == 0 or not tensor.numel()
        places.append([tensor.data_ptr() for tensor in found])
    assert num_bytes < 1 << 12 or all(place == places[0] for place in places)


def test_arrays_wait_for_the_upload() -> None:
    buffers = StepBuffers(CPU, 64)
    buffers.begin()
    first = buffers.put(np.array([1, 2]))
    buffers.upload()
    buffers.begin()
    second = buffers.put(np.array([3, 4]))
    assert first.tolist() == [1, 2]
    buffers.upload()
    assert first.tolist() == second.tolist() == [3, 4]


class LateBuffers(StepBuffers):
    """StepBuffers whose copies begin when the step is computed, which may be after the next step was put."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waiting: list[int] = []

    def begin(self) -> None:
        super().begin()
        assert self._turn not in self.waiting, "the host block is still to be copied"
        self._hosts[self._turn].fill_(POISON)
        self.waiting.append(self._turn)

    def upload(self) -> None:
        self._block.copy_(self._hosts[self.waiting.pop(0)])


class LateExecutor(TorchExecutor):
    """Executor that computes a step when it is collected."""

    def launch(self, plan: StepPlan) -> Any:
        assert not plan.copies
        previous, self._sampled = self._sampled, SampledTokens()
        (part,) = split(plan.rows, self._logits_at_once)
        return plan, self._pack_part(part, previous), previous, self._sampled

    def collect(self, pending: Any) -> StepResult:
        plan, packed, previous, current = pending
        self._sampler.forget(plan.finished)
        with torch.inference_mode():
            stopwatch = Stopwatch(self.device)
            part = self._launch_part(packed, previous, current)
        return super().collect(LaunchedStep(len(plan.rows), [part], stopwatch, []))


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_that_are_computed_after_the_next_was_packed(graphs: bool) -> None:
    settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 40}
    changes: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"logprobs": 1}, {"temperature": 0.7}]
    params = [sampling(max_tokens=9 + 2 * index, **more) for index, more in enumerate(changes)]
    wanted = [*zip(PROMPTS, params, strict=False)]
    expected = generate_all(make_engine(seed=5, **settings), *wanted)
    engine = make_engine(looks_ahead=True, seed=5, **settings)
    executor: Any = engine.executor
    executor.__class__ = LateExecutor
    if graphs:
        capture_fake_graphs(executor, MAX_GRAPH, 512, LateBuffers)
    else:
        executor._buffers = LateBuffers(CPU, 1 << 16)
    assert_same(generate_all(engine, *wanted), expected)
    assert not executor._buffers.waiting


def test_the_largest_step_fits() -> None:
    tokens, rows, context, groups, block_size = 128, 128, 8192, 2, 16
    num_bytes = step_bytes(tokens, rows, context, groups, block_size, num_shapes=30)
    buffers = StepBuffers(CPU, num_bytes)
    buffers.begin()
    shapes = [((tokens,), 8), ((tokens,), 8), ((groups, tokens), 8), ((rows + 1,), 4), ((rows,), 4)]
    shapes += [((groups, rows, context // block_size), 4), ((tokens,), 8), ((6, rows), 8), ((rows,), 8), ((rows,), 8)]
    shapes += [((rows + 296, 8), 4), ((148, 4), 4)] * 30  # work lists on 148 multiprocessors with one KV head
    for shape, size in shapes:
        buffers.put(np.zeros(shape, {8: np.int64, 4: np.int32}[size]))
    assert not buffers._large
