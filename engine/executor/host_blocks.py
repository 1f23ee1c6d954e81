"""Swap of KV blocks and recurrent states to and from host memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager

import numpy as np
import torch

from llmsched.engine.executor.buffers import to_device
from llmsched.engine.executor.stopwatch import Stopwatch
from llmsched.engine.model.paged_cache import KVCache
from llmsched.engine.model.recurrent_layers import StateTensors

#: Largest number of blocks that are gathered at a time. It limits the memory of the gathered copy.
MAX_GATHERED = 64

Pairs = ListLike[tuple[int, int]]


class HostBlocks:
    """Blocks in host memory, to which KV blocks can be swapped. The slots of a StateTensors are swapped like blocks."""

    # On a GPU, the host memory is page-locked and copies run on a separate stream. Copies start after all work that is
    # already queued on the compute stream, and work that is queued there later waits for the copies.

    def __init__(self, cache: KVCache | StateTensors, num_blocks: int, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._timed_copies: list[Stopwatch] = []
        tensors = cache.tensors
        shapes = [(num_blocks, *tensor.shape[1:]) for tensor in tensors]
        sizes = [math.prod(shape) * tensor.itemsize for shape, tensor in zip(shapes, tensors, strict=True)]
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
        if on_gpu:
            # torch rounds pinned tensors up to a power of two bytes, which could be twice the planned memory.
            cudart, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
            weakref.finalize(self, cudart.cudaHostUnregister, address).atexit = False
        else:
            memory.zero_()  # allocate the pages now, not during the first copies
        parts = [
            part.view(tensor.dtype).view(shape)
            for part, tensor, shape in zip(torch.split(memory, sizes), tensors, shapes, strict=True)
        ]
        self._layers = list(zip(tensors, parts, strict=True))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks of the cache to host blocks, for each pair (block, host block)."""
        blocks, host_blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
        with self._timed():
            for part in _runs(host_blocks):
                indices, first = to_device(blocks[part], self._device), int(host_blocks[part.start])
                for tensor, host in self._layers:
                    host[first : first + len(indices)].copy_(tensor[indices], non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy host blocks to blocks of the cache, for each pair (host block, block)."""
        host_blocks, blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
        with self._timed():
            for part in _runs(host_blocks):
                indices, first = to_device(blocks[part], self._device), int(host_blocks[part.start])
                for tensor, host in self._layers:
                    tensor[indices] = host[first : first + len(indices)].to(self._device, non_blocking=True)

    def take_times(self) -> list[Stopwatch]:
        """Return the stopwatches of all copies since the last call. On a GPU, the copies may still be running."""
        times, self._timed_copies = self._timed_copies, []
        return times

    @contextmanager
    def _timed(self) -> Iterator[None]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                stopwatch = Stopwatch(self._device)
                yield
                stopwatch.stop()
        finally:
            if self._stream is not None:  # the next step must wait even for copies that were queued before an error
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._timed_copies.append(stopwatch)


def _runs(host_blocks: np.ndarray) -> Iterator[slice]:
    """Yield slices that split `host_blocks` into runs of consecutive ids, each of at most MAX_GATHERED blocks."""
    start = 0
    for end in range(1, len(host_blocks) + 1):
        if end == len(host_blocks) or host_blocks[end] != host_blocks[end - 1] + 1 or end - start == MAX_GATHERED:
            yield slice(start, end)
            start = end
