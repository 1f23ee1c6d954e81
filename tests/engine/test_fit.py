"""Sizing of KV by measured memory, as on a GPU, with an executor whose memory is invented."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from alike import PROMPTS, assert_same
from engines import generate_all, sampling
from fake_graphs import FakeRecorder

from llmsched.engine import build
from llmsched.engine.architecture.geometry import Geometry, LayerGroup
from llmsched.engine.architecture.shape import ModelShape
from llmsched.engine.architecture.weights import Weights
from llmsched.engine.config import EngineConfig
from llmsched.engine.device import DeviceMemory
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.memory.graph_memory import CapturedGraphs, graph_sizes
from llmsched.engine.memory.plan import MeasuredMemory, MemoryPlan
from llmsched.engine.memory.planner import plan_memory
from llmsched.engine.progress import silent

MIB, GIB = 1 << 20, 1 << 30
#: Sizes of Llama-3.1-8B.
GEOMETRY = Geometry((LayerGroup("full", 32, 8, 128, 128),), "exact", ())
SHAPE = ModelShape(GEOMETRY, Weights(15 * GIB, "config", True), 128256, 4096, 14336, 131072)
GPU = DeviceMemory("cuda", "test GPU", 24 * GIB, used_by_others=GIB // 2)


@dataclass
class FakeExecutor:
    """Executor of which only the memory matters. `full` is the number of blocks from which memory runs out."""

    context: int = 300 * MIB
    graphs: int = 100 * MIB
    driver_keeps: int = 0  # of the memory of dropped graphs
    kept: int = 40 * MIB
    late: int = 0
    full: float = float("inf")
    blocks: int = 256
    reserved: list[int] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
    weights: int = 15 * GIB
    block_bytes: int = 2 * MIB
    has_graphs: bool = False

    @property
    def num_blocks(self) -> int:
        return self.blocks

    @property
    def kv_cache_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def reserved_bytes(self) -> int:
        return self.weights + self.kv_cache_bytes + self.kept

    def used_bytes(self) -> int:
        late = self.late if len(self.reserved) > 1 else 0
        held = self.graphs if self.has_graphs else self.driver_keeps if self.captured else 0
        return self.reserved_bytes() + self.context + held + late + GPU.used_by_others

    def reserve_host(self, num_host_blocks: int, num_host_states: int) -> None:
        assert (num_host_blocks, num_host_states) == (7, 0)

    def reserve(self, num_blocks: int) -> None:
        self.reserved.append(num_blocks)
        self.has_graphs = False
        self.blocks = num_blocks
        if num_blocks >= self.full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def capture(self, max_rows: int, max_model_len: int, progress: Any) -> CapturedGraphs | None:
        assert max_rows == 128
        self.captured.append(max_model_len)
        self.has_graphs = True
        return CapturedGraphs(8, 128, 1.0, self.graphs)


def fit(executor: FakeExecutor, peak: int = 100 * MIB, **knobs: Any) -> tuple[MemoryPlan, MemoryPlan, MeasuredMemory]:
    """Return the plan before and after, and the measured memory."""
    config = EngineConfig(**{"max_model_len": 8192, **knobs})
    plan = plan_memory(SHAPE, config, GPU, dtype_bytes=2)
    measured = MeasuredMemory(executor.weights, 0, peak)
    return plan, *build._fit(executor, config, plan, measured, SwapSpace(7, 1), silent)  # type: ignore[arg-type]


def blocks_beside(plan: MemoryPlan, executor: FakeExecutor, activations: int) -> int:
    fixed = executor.weights + executor.context + executor.graphs + activations
    return (plan.budget_bytes - fixed) // plan.block_bytes


@pytest.mark.parametrize("driver_keeps", [0, 60 * MIB, 100 * MIB])
def test_kv_takes_what_is_left_after_the_measured_parts(driver_keeps: int) -> None:
    executor = FakeExecutor(driver_keeps=driver_keeps)
    before, plan, measured = fit(executor)
    assert plan.num_blocks == blocks_beside(plan, executor, before.activation_bytes) > before.num_blocks
    assert executor.reserved == [256, plan.num_blocks]
    assert len(executor.captured) == 2
    assert (plan.graph_bytes, plan.context_bytes) == (before.graph_bytes, before.context_bytes), "still the prediction"
    assert (measured.context, measured.graphs) == (executor.context, CapturedGraphs(8, 128, 1.0, executor.graphs))


def test_activations_that_take_more_than_planned_leave_less_for_kv() -> None:
    executor = FakeExecutor(graphs=700 * MIB)
    before, plan, _ = fit(executor, peak=GIB)
    assert plan.num_blocks == blocks_beside(plan, executor, GIB) < before.num_blocks


def test_blocks_that_do_not_fit_are_planned_again_once() -> None:
    executor = FakeExecutor(late=90 * MIB, driver_keeps=30 * MIB)
    _, plan, measured = fit(executor)
    _, first, second = executor.reserved
    assert first - 46 <= second == plan.num_blocks < first
    assert measured.context == executor.context
    used = executor.used_bytes() - executor.kept - GPU.used_by_others
    assert used + plan.activation_bytes <= plan.budget_bytes
    assert len(executor.captured) == 2


def test_running_out_of_memory_lowers_the_number_of_blocks_once() -> None:
    executor = FakeExecutor(full=3000)
    _, plan, _ = fit(executor)
    _, first, second = executor.reserved
    assert second == plan.num_blocks == first - 1 - build.SPARE_BYTES // plan.block_bytes
    with pytest.raises(torch.OutOfMemoryError):
        fit(FakeExecutor(full=257))


def test_a_chosen_number_of_blocks_stays() -> None:
    executor = FakeExecutor(context=2 * GIB, late=GIB)
    _, plan, _ = fit(executor, num_gpu_blocks_override=2000)
    assert executor.reserved == [256, 2000]
    assert plan.num_blocks == 2000


def test_a_context_that_was_lowered_to_what_fits_is_chosen_again() -> None:
    before, plan, _ = fit(FakeExecutor(context=900 * MIB), max_model_len=None)
    assert plan.max_model_len == plan.longest < before.max_model_len
    assert len(plan.notes) == len(before.notes) == 1
    assert str(plan.max_model_len) not in before.notes[0]


def test_what_does_not_fit_is_refused_with_the_measured_figures() -> None:
    with pytest.raises(ConfigError, match=r"CUDA context 8\.00 GiB \+ graphs 100 MiB"):
        fit(FakeExecutor(context=8 * GIB))


def test_enforce_eager_captures_and_plans_no_graphs() -> None:
    executor = FakeExecutor(graphs=0)
    before, plan, measured = fit(executor, enforce_eager=True)
    assert not executor.captured
    assert measured.graphs is None
    assert before.graph_bytes == plan.graph_bytes == 0
    assert plan.num_blocks == blocks_beside(plan, executor, before.activation_bytes)


def test_an_engine_that_is_built_as_on_a_gpu_serves_with_graphs(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device says that it is a GPU. Its memory is invented, and its graphs are fake."""
    config = EngineConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu", max_num_seqs=6, swap_space=MIB)
    params = [sampling(max_tokens=12, temperature=0.5 * (index % 2), seed=3) for index in range(8)]
    wanted = [*zip(PROMPTS, params, strict=True)]
    expected = generate_all(build.build_engine(replace(config, num_gpu_blocks_override=200)), *wanted)
    recorder, threads = FakeRecorder(), set()
    capture = TorchExecutor.capture

    def captured(executor: TorchExecutor, *arguments: Any) -> CapturedGraphs | None:
        threads.add(threading.current_thread().name)
        return capture(executor, *arguments, record=recorder)

    monkeypatch.setattr(TorchExecutor, "capture", captured)
    monkeypatch.setattr(TorchExecutor, "reserved_bytes", lambda executor: 3 * MIB + executor.kv_cache_bytes)
    monkeypatch.setattr(TorchExecutor, "used_bytes", lambda executor: 40 * MIB + getattr(executor, "kv_cache_bytes", 0))
    monkeypatch.setattr(build, "device_memory", lambda _: DeviceMemory("cuda", "test GPU", 520 * MIB))
    monkeypatch.setattr(build, "starts_empty", lambda _: False)
    engine = build.build_engine(config)
    assert engine.plan is not None
    assert engine.plan.measured is not None
    assert engine.plan.measured.context == 37 * MIB
    assert engine.plan.measured.graphs is not None
    assert engine.plan.measured.graphs.num_graphs == len(graph_sizes(6)) == 4
    executor: Any = engine.executor
    assert executor.num_blocks == engine.plan.num_blocks == engine.scheduler.kv.pool.num_blocks > build.WARMUP_BLOCKS
    assert engine.scheduler.kv.swap.num_blocks > 0
    assert threads == {"llmsched-warm-up"}
    recorder.replays.clear()
    assert_same(generate_all(engine, *wanted), expected)
    assert set(recorder.replays) == {1, 2, 6}  # six requests run at first, then two, then one
