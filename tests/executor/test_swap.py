"""Host blocks: exact copies, in the order that a plan states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import build_model

from llmsched.engine.executor.base import StepPlan
from llmsched.engine.executor.host_blocks import MAX_GATHERED, HostBlocks, _runs
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.model.paged_cache import KVCache, LayerShape

CPU = torch.device("cpu")


def cache_of(dtype: torch.dtype, num_blocks: int = 8) -> KVCache:
    """Return two layers of random numbers, whose keys and values differ in width."""
    cache = KVCache.allocate([LayerShape(2, 6, 4), LayerShape(1, 8, 8)], num_blocks, KVLayout(4), dtype, CPU)
    for seed, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def layers(cache: KVCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("out", "back"),
    [
        ([(6, 0), (1, 4), (3, 2)], [(4, 5), (0, 1), (2, 7)]),
        ([(6, 2), (1, 3), (3, 4), (0, 7)], [(2, 0), (3, 2), (4, 4), (7, 5)]),  # runs of host blocks
    ],
)
def test_what_comes_back_is_what_went(
    dtype: torch.dtype, out: list[tuple[int, int]], back: list[tuple[int, int]]
) -> None:
    cache = cache_of(dtype)
    before, host = layers(cache), HostBlocks(cache, 8, CPU)
    host.swap_out(out)
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    host.swap_in(back)
    saved = {slot: block for block, slot in out}
    origin = {block: saved[slot] for slot, block in back}
    for was, now in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(now[[*origin]], was[[*origin.values()]])
        assert not now[[block for block in range(8) if block not in origin]].any()


def test_seconds_are_counted_once() -> None:
    host = HostBlocks(cache_of(torch.float32), 2, CPU)
    assert host.take_times() == []
    host.swap_out([(0, 0)])
    host.swap_in([(0, 1)])
    out, back = host.take_times()
    assert min(out.seconds(), back.seconds()) > 0
    assert host.take_times() == []


def test_a_step_saves_then_copies_then_restores() -> None:
    """Block 0 is swapped out, then becomes the destination of a copy from 1, and block 1 is swapped in."""
    executor = TorchExecutor(
        build_model("llama", seed=3),
        num_blocks=4,
        block_size=4,
        device="cpu",
        kv_dtype=torch.float32,
        num_host_blocks=2,
    )
    keys = executor._cache.keys[0]
    for block in range(4):
        keys[block] = block + 1.0
    executor.execute(StepPlan((), swap_out=[(3, 1)]))
    result = executor.execute(StepPlan((), swap_out=[(0, 0)], copies=[(1, 0)], swap_in=[(1, 1)]))
    assert [float(keys[block].mean()) for block in range(4)] == [2.0, 4.0, 3.0, 4.0]
    assert 0 < result.swap_elapsed <= result.elapsed
    executor.execute(StepPlan((), swap_in=[(0, 2)]))
    assert float(keys[2].mean()) == 1.0
    assert executor.execute(StepPlan(())).swap_elapsed == 0


def test_consecutive_host_blocks_are_copied_together() -> None:
    def runs(host_blocks: list[int]) -> list[list[int]]:
        array = np.array(host_blocks)
        return [array[part].tolist() for part in _runs(array)]

    assert runs([3]) == [[3]]
    assert runs([3, 4, 5, 9, 8, 10, 11]) == [[3, 4, 5], [9], [8], [10, 11]]
    assert [len(run) for run in runs(list(range(2 * MAX_GATHERED + 1)))] == [MAX_GATHERED, MAX_GATHERED, 1]


def test_pages_are_locked_once_and_unlocked_with_the_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            calls.append(("lock", size))
            return flags

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            calls.append(("unlock", 0))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    cache = cache_of(torch.bfloat16)
    host = HostBlocks(cache, 3, torch.device("cuda"))
    size = 3 * cache.num_bytes // 8
    assert calls == [("lock", size)]
    assert sum(part.nbytes for _, part in host._layers) == size
    del host
    assert calls == [("lock", size), ("unlock", 0)]
