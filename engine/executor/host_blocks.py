"""Host memory that KV blocks are copied to and from."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike

import numpy as np
import torch

from llmsched.engine.executor.batch import to_device
from llmsched.engine.model.paged import KVCache

#: Blocks that are gathered at a time on a GPU: bounds the memory of the gathered copy, one layer's at a time.
MAX_GATHERED = 64

Pairs = ListLike[tuple[int, int]]


class HostBlocks:
    """`num_slots` blocks in host memory, one slot like a block of the cache: the same type, so a copy and its way back
    change nothing.

    On a CPU a copy is a plain one. On a GPU host memory is page-locked and copies run on a stream of their own, after
    what the computing stream was given before, and before what it is given afterwards.
    """

    def __init__(self, cache: KVCache, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0
        tensors = [*cache.keys, *cache.values]
        shapes = [(num_slots, *tensor.shape[1:]) for tensor in tensors]
        sizes = [math.prod(shape) * tensor.itemsize for shape, tensor in zip(shapes, tensors, strict=True)]
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
        if not self._on_gpu:
            memory.zero_()  # takes the memory now, not amid the first copies
        else:
            weakref.finalize(self, _lock_pages(memory)).atexit = False
        parts = [
            part.view(tensor.dtype).view(shape)
            for part, tensor, shape in zip(torch.split(memory, sizes), tensors, shapes, strict=True)
        ]
        self._layers = list(zip(tensors, parts, strict=True))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks to slots: (block, slot) pairs."""
        blocks, slots = _columns(pairs)
        self._timed(self._gather_out if self._on_gpu else self._copy_out, blocks, slots)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy slots to blocks: (slot, block) pairs."""
        slots, blocks = _columns(pairs)
        self._timed(self._scatter_in if self._on_gpu else self._copy_in, blocks, slots)

    def seconds(self) -> float:
        """How long the copies since the last call took; on a GPU it waits for them."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds

    def _timed(self, copy: Callable[[np.ndarray, np.ndarray], None], blocks: np.ndarray, slots: np.ndarray) -> None:
        if self._stream is None:
            started = time.perf_counter()
            copy(blocks, slots)
            self._seconds += time.perf_counter() - started
            return
        computing = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computing)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            copy(blocks, slots)
            end.record(self._stream)
        computing.wait_stream(self._stream)
        self._events.append((start, end))

    # -- CPU --------------------------------------------------------------------------------------------------

    def _copy_out(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        sources, destinations = torch.from_numpy(blocks), torch.from_numpy(slots)
        for tensor, host in self._layers:
            host[destinations] = tensor[sources]

    def _copy_in(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        sources, destinations = torch.from_numpy(slots), torch.from_numpy(blocks)
        for tensor, host in self._layers:
            tensor[destinations] = host[sources]

    # -- GPU: blocks lie anywhere, slots mostly side by side ----------------------------------------------------

    def _gather_out(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        for part in _runs(slots):
            indices, first = to_device(blocks[part], self._device), int(slots[part.start])
            for tensor, host in self._layers:
                host[first : first + len(indices)].copy_(tensor[indices], non_blocking=True)

    def _scatter_in(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        for part in _runs(slots):
            indices, first = to_device(blocks[part], self._device), int(slots[part.start])
            for tensor, host in self._layers:
                tensor[indices] = host[first : first + len(indices)].to(self._device, non_blocking=True)


def _lock_pages(memory: torch.Tensor) -> Callable[[], None]:
    """Page-lock the tensor's memory; returns what undoes that.

    torch's own pinned tensors are rounded up to a power of two, which could be twice the memory that was planned for.
    """
    cudart, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))

    def unlock() -> None:
        cudart.cudaHostUnregister(address)

    return unlock


def _columns(pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return np.ascontiguousarray(array[:, 0]), np.ascontiguousarray(array[:, 1])


def _runs(slots: np.ndarray) -> Iterator[slice]:
    """Slices of `slots` that count up by one, at most MAX_GATHERED long."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1 or end - start == MAX_GATHERED:
            yield slice(start, end)
            start = end
