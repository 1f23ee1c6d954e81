"""Memory for the arrays of a step, and asynchronous copies between host and device."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Alignment of arrays in bytes. Kernels read aligned vectors of up to 16 bytes.
ALIGNMENT = 16

#: Largest block for the arrays of a step. Larger steps, with many long contexts, take more than one copy.
MAX_STEP_BYTES = 16 << 20

#: Bytes of the empty work items of one shape of attention; it takes 13 KB on 148 multiprocessors with one KV head.
WORK_BYTES = 1 << 14

_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class StepBuffers:
    """Memory on the device for the arrays of one step, which a single copy from the host fills.

    `begin()` starts a step, `put(...)` writes an array to host memory, and `upload()` copies all arrays to the device.
    Arrays with equal shapes that are put in the same order have the same addresses in every step. An array that does
    not fit into `num_bytes` gets memory of its own.
    """

    # There are two host blocks, used in turn, so that a step can be written while the copy of the step before it is
    # still queued. On a GPU they are pinned.

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        num_bytes += -num_bytes % ALIGNMENT
        self._on_gpu = device.type == "cuda"
        self._block = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._views = {name: self._block.view(dtype) for name, dtype in _TYPES.items()}
        self._hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(2)]
        self._bytes: list[npt.NDArray[np.uint8]] = [host.numpy() for host in self._hosts]
        self._copied: list[Any] = [torch.cuda.Event() for _ in self._hosts] if self._on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._large: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Bytes of the arrays that were put since `begin`, with padding.
        self.num_used = 0

    def begin(self) -> None:
        """Start a step. On a GPU, wait until the host memory for this step is free."""
        self._turn = 1 - self._turn
        self.num_used = 0
        self._large = []
        if self._on_gpu:
            self._copied[self._turn].synchronize()

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Add an array to the step. The result holds the array on the device from this `upload()` to the next."""
        dtype, start = _TYPES[array.dtype], self.num_used
        if start + array.nbytes > len(self._block):
            host = torch.empty(array.shape, dtype=dtype, pin_memory=self._on_gpu)
            host.numpy()[...] = array
            device = torch.empty(array.shape, dtype=dtype, device=self._block.device)
            self._large.append((device, host))
            return device
        self._bytes[self._turn][start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        self.num_used = start + array.nbytes + -array.nbytes % ALIGNMENT
        strides = [prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        return torch.as_strided(self._views[array.dtype], array.shape, strides, start // array.itemsize)

    @property
    def fits(self) -> bool:
        """True if no array of the step has memory of its own."""
        return not self._large

    def upload(self) -> None:
        """Start to copy the step's arrays to the device."""
        self._block[: self.num_used].copy_(self._hosts[self._turn][: self.num_used], non_blocking=True)
        for device, host in self._large:
            device.copy_(host, non_blocking=True)
        if self._on_gpu:
            self._copied[self._turn].record(torch.cuda.current_stream(self._block.device))


def step_bytes(
    num_tokens: int, num_seqs: int, max_context: int, num_groups: int, block_size: int, num_shapes: int
) -> int:
    """Return the bytes to reserve for the arrays of a step.

    Attention has a list of work items for each of its `num_shapes` shapes. In steps of decodes, all these lists fit.
    """
    works = num_shapes * (num_seqs * 40 + WORK_BYTES)
    tables = 4 * num_groups * num_seqs * -(-max_context // block_size)
    return tables + num_tokens * (64 + 8 * num_groups) + num_seqs * 64 + works


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to `device`. The CPU does not wait for copies to a GPU."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Asynchronous copy of a tensor to host memory. `wait()` returns the copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._written = tensor, None
        if tensor.device.type == "cuda":
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = pinned.copy_(tensor, non_blocking=True)
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        if self._written is not None:
            self._written.synchronize()
        return self._tensor
