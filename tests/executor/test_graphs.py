"""Capture of graphs: every size is captured, and a model that cannot be captured runs without."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder, capture_fake_graphs
from stepping import Stepper, make_sequence
from tiny_models import build_model

from llmsched.engine.executor.buffers import StepBuffers
from llmsched.engine.executor.graphs import NotCapturableError, NothingWaits, cuda_recorder
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.memory.graph_memory import graph_sizes
from llmsched.kernels.dispatch import num_compiled

MAX_ROWS, LENGTH = 70, 16


def make_executor() -> TorchExecutor:
    sizes: dict[str, Any] = {"num_blocks": MAX_ROWS * 4, "block_size": 4, "kv_dtype": torch.float32}
    return TorchExecutor(build_model("llama", seed=5, num_hidden_layers=1), **sizes, device="cpu")


def test_every_number_of_decodes_runs_in_the_smallest_graph_without_compilation() -> None:
    executor = make_executor()
    executor.warmup(MAX_ROWS, MAX_ROWS, LENGTH)
    recorder = capture_fake_graphs(executor, MAX_ROWS, LENGTH)
    sizes = graph_sizes(MAX_ROWS)
    assert executor._graphs is not None
    assert executor._graphs.sizes == sizes
    before = num_compiled()
    for rows in range(1, MAX_ROWS + 1):
        stepper = Stepper(executor, [make_sequence(str(row), [row, 5], seed=row) for row in range(rows)], LENGTH)
        stepper.computed = [1] * rows
        stepper.step((1,))
    assert recorder.replays == [min(size for size in sizes if size >= rows) for rows in range(1, MAX_ROWS + 1)]
    assert num_compiled() == before


def test_padding_writes_no_keys_and_values() -> None:
    executor = make_executor()
    capture_fake_graphs(executor, 4, LENGTH)
    executor._cache.keys[0].fill_(7)
    executor._cache.values[0].fill_(7)
    stepper = Stepper(executor, [make_sequence(str(row), [5]) for row in range(3)], 4)
    stepper.generate(1)
    written = {(block, 0) for block in stepper.tables.flatten().tolist()}
    for tensor in (executor._cache.keys[0], executor._cache.values[0]):
        assert {(block, cell) for block, _, cell, _ in (tensor != 7).nonzero().tolist()} == written


def test_all_graphs_put_their_logits_in_one_tensor() -> None:
    executor = make_executor()
    capture_fake_graphs(executor, MAX_ROWS, LENGTH)
    graphs = executor._graphs
    assert graphs is not None
    with torch.inference_mode():
        found = [graphs.run(executor._decode_inputs(size, 2)) for size in graphs.sizes]
    assert {logits.data_ptr() for logits in found} == {found[0].data_ptr()}
    assert found[0].untyped_storage().nbytes() == MAX_ROWS * executor.vocab_size * 4


def test_garbage_is_not_collected_during_a_capture() -> None:
    executor, enabled = make_executor(), []

    def record(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
        enabled.append(gc.isenabled())
        return replay_nothing(run)

    assert executor.capture(4, LENGTH, record=record) is None
    assert enabled == [False]
    assert gc.isenabled()


def replay_nothing(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """Return a replay that ignores later changes of the inputs."""
    run()
    return lambda: None


def not_permitted(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    try:
        raise RuntimeError("operation not permitted when stream is capturing")
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def out_of_memory(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    raise torch.OutOfMemoryError("CUDA out of memory")


FAILURES: list[tuple[Any, str]] = [
    (replay_nothing, "a replayed pass computes other logits"),
    (not_permitted, "operation not permitted when stream is capturing"),
    (out_of_memory, "CUDA out of memory"),
]


@pytest.mark.parametrize(("record", "reason"), FAILURES)
def test_a_model_that_cannot_be_captured_runs_without_graphs(
    record: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor = make_executor()
    assert executor.capture(MAX_ROWS, LENGTH, record=record) is None
    (warning,) = caplog.messages
    assert warning.startswith("decodes run without CUDA graphs")
    assert reason in warning
    sequences = [make_sequence(str(row), [5, row]) for row in range(3)]
    expected = Stepper(make_executor(), sequences, LENGTH).generate(5)
    assert Stepper(executor, [make_sequence(str(row), [5, row]) for row in range(3)], LENGTH).generate(5) == expected


def test_a_new_cache_needs_new_graphs() -> None:
    def tokens() -> list[list[int]]:
        return Stepper(executor, [make_sequence(str(row), [5, row]) for row in range(3)], LENGTH).generate(5)

    executor = make_executor()
    expected = tokens()
    first = capture_fake_graphs(executor, 4, LENGTH)
    assert tokens() == expected
    assert len(first.replays) == 4
    executor.reserve(20)
    assert tokens() == expected
    second = capture_fake_graphs(executor, 4, LENGTH)
    assert tokens() == expected
    assert (len(first.replays), len(second.replays)) == (4, 4)


def test_a_model_that_waits_for_the_device_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    executor, recorder = make_executor(), FakeRecorder()
    forward = executor._model.forward

    def looking(input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        assert input_ids.max() >= 0
        return forward(input_ids, *others)

    executor._model.forward = looking  # type: ignore[method-assign]
    assert executor.capture(MAX_ROWS, LENGTH, record=recorder) is None
    assert "waits for values on the device" in caplog.messages[0]
    assert not recorder.replays


def test_arrays_with_memory_of_their_own_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    executor = make_executor()
    executor._buffers = StepBuffers(executor.device, 16)
    assert executor.capture(MAX_ROWS, LENGTH, record=FakeRecorder()) is None
    assert "do not fit" in caplog.messages[0]


class Stream:
    device_index = 3


def test_captures_on_a_gpu_share_a_pool_and_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed capture is reported to torch's allocator, which otherwise stays in capture mode."""
    told: list[Any] = []
    ending: list[Exception] = []

    @contextmanager
    def capture(graph: Any, **options: Any) -> Iterator[None]:
        told.append(options)
        yield
        if ending:
            raise ending[0]

    replays: list[int] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.append(1)))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: told.append(where), raising=False)
    stream: Any = Stream()
    record = cuda_recorder(stream)
    for replay in [record(lambda: IDS), record(lambda: IDS)]:
        replay()
    assert told == [{"pool": "pool", "stream": stream, "capture_error_mode": "thread_local"}] * 2
    assert len(replays) == 2
    ending.append(RuntimeError("capture was invalidated"))
    with pytest.raises(RuntimeError, match="invalidated"):
        record(lambda: IDS)
    assert told[3] == (3, "pool")


CPU, IDS = torch.device("cpu"), torch.tensor([3, 1, 2])
WAITING: dict[str, Callable[[], Any]] = {
    "item": IDS[0].item,
    "truth": lambda: bool(IDS.max() > 2),
    "nonzero": IDS.nonzero,
    "where": lambda: torch.where(IDS > 1),
    "selection by a mask": lambda: IDS[IDS > 1],
    "assignment by a mask": lambda: IDS.clone().__setitem__(IDS > 1, 3),
    "masked_select": lambda: IDS.masked_select(IDS > 1),
    "unique": IDS.unique,
    "bincount": IDS.bincount,
    "repetition": lambda: IDS.repeat_interleave(IDS),
    "comparison": lambda: torch.equal(IDS, IDS),
    "range": lambda: torch.arange(IDS[0]),
    "copy from the host": lambda: torch.tensor([1.0]).to("meta"),
    "copy into a tensor": lambda: torch.empty(3, dtype=torch.int64, device="meta").copy_(IDS),
}


@pytest.mark.parametrize("name", WAITING)
def test_operations_that_wait_are_found(name: str) -> None:
    with torch.inference_mode(), NothingWaits(CPU), pytest.raises(NotCapturableError):
        WAITING[name]()


def test_values_on_the_host_can_be_read_at_once() -> None:
    with torch.inference_mode(), NothingWaits(torch.device("meta")):
        assert IDS.max().item() == 3
        assert len(IDS[IDS > 1]) == 2


def test_operations_that_do_not_wait_are_allowed() -> None:
    with torch.inference_mode(), NothingWaits(CPU):
        weights = torch.ones(3, 4)
        found = torch.where(IDS > 1, weights.sum(1), 0.0)[IDS - 1].to(torch.bfloat16)
        assert torch.nn.functional.linear(weights, weights, found.float()).shape == (3, 3)
