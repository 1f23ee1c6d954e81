"""Recordings of work on the CPU, which are replayed without Python code between kernels."""
# A decode step of a small model is hundreds of kernels of some microseconds, and Python takes as long to call them. A
# replay runs all kernels between two operations of torch in one parallel region, with barriers around each kernel that
# runs on several threads.

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from llmsched.kernels.cpu import openmp
from llmsched.kernels.cpu.compiled import c_function
from llmsched.kernels.cpu.openmp import arguments_type, as_pointer, barrier, call, thread_num

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})

Calls = arguments_type(addresses=("calls",), sizes=("count",))


class NotRecordableError(Exception):
    """Error for work that cannot be recorded. The message says why."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records work while it is done: kernels that `openmp.run` starts, and torch's operations.

    `replay()` does the same work on the same memory. What other code reads or writes is not repeated. So inputs must
    stay at their addresses, and results are valid until the next replay. Memory that the work allocates and frees is
    used again within the recording. Raises NotRecordableError if an operation returns anything but tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Callable[[], object]] = []
        self._calls: list[tuple[int, Any, bool]] = []  # kernels since the last operation, see `openmp.State`
        #: Memory by its address, and the storage that has it now.
        self._memory: dict[int, tuple[Tensor, StorageWeakRef]] = {}

    def __enter__(self) -> Recording:
        openmp.state.calls = self._calls
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        openmp.state.calls = None
        self._end_region()

    def replay(self) -> None:
        for step in self._steps:
            step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        results, given = tree_leaves(found), tree_leaves((args, kwargs))
        if not all(isinstance(each, Tensor) for each in results):
            raise NotRecordableError(f"{func} returns values to the host")
        if func._schema.is_mutable:
            self._add(partial(func, *self._alias(args), **self._alias(kwargs or {})))
            return found
        sources = {each.untyped_storage().data_ptr() for each in given if isinstance(each, Tensor)}
        if all(each.untyped_storage().data_ptr() in sources for each in results):
            return found  # views
        if func.overloadpacket.__name__ in _ALLOCATIONS:
            return self._in_own_memory(found)
        kept = tree_map_only(Tensor, lambda each: self._in_own_memory(each).copy_(each), found)
        run = partial(func, *self._alias(args), **self._alias(kwargs or {}))
        self._add(partial(_copy_results, run, tree_leaves(self._alias(kept))))
        return kept

    def _add(self, step: Callable[[], object]) -> None:
        self._end_region()
        self._steps.append(step)

    def _end_region(self) -> None:
        if not self._calls:
            return
        kept = list(self._calls)
        self._calls.clear()
        rows = [(function, ctypes.addressof(arguments), parallel) for function, arguments, parallel in kept]
        table, parallel = np.array(rows, np.intp), any(call[2] for call in kept)
        self._steps.append(partial(_run_calls, Calls(table.ctypes.data, len(table)), parallel, table, kept))

    def _in_own_memory(self, found: Tensor) -> Tensor:
        """Return a tensor like `found`, without its numbers, in memory of this recording."""
        num_bytes = found.untyped_storage().nbytes()
        if num_bytes == 0:
            return found
        owned: list[tuple[Tensor, Any]] = list(self._memory.values())
        memory = next((memory for memory, user in owned if memory.nbytes == num_bytes and user.expired()), None)
        memory = torch.empty(num_bytes, dtype=torch.uint8) if memory is None else memory
        kept = _view(memory, found)
        user = StorageWeakRef(kept.untyped_storage())  # type: ignore[no-untyped-call]
        self._memory[memory.data_ptr()] = memory, user
        return kept

    def _alias(self, values: Any) -> Any:
        """Replace tensors in this recording's memory by others that do not keep the memory from being used again."""

        def alias(tensor: Tensor) -> Tensor:
            memory, _ = self._memory.get(tensor.untyped_storage().data_ptr(), (None, None))
            return tensor if memory is None else _view(memory, tensor)

        return tree_map_only(Tensor, alias, values)


def compile_replay() -> None:
    calls_body()


def _view(memory: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that has the memory of `memory` in a storage of its own."""
    whole = torch.frombuffer(memory.numpy(), dtype=like.dtype)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())


def _copy_results(run: Callable[[], Any], targets: Sequence[Tensor]) -> None:
    for target, found in zip(targets, tree_leaves(run()), strict=True):
        target.copy_(found)


def _run_calls(region: Any, parallel: bool, table: object, calls: Sequence[tuple[int, Any, bool]]) -> None:
    # `table` is what `region` points to. Kernels divide their work among as many threads as their arguments say.
    if parallel and region.num_threads != (num_threads := torch.get_num_threads()):
        for _, arguments, on_all_threads in calls:
            if on_all_threads:
                arguments.num_threads = num_threads
    openmp.run(calls_body(), region, parallel=parallel)


@cache
def calls_body() -> Any:
    @c_function(types.CPointer(numba.from_dtype(Calls.dtype)))
    def body(pointer: Any) -> None:
        a = numba.carray(pointer, 1)[0]
        calls = numba.carray(as_pointer(a.calls), (a.count, 3), np.intp)
        thread = thread_num()
        for number in range(a.count):
            parallel = calls[number, 2] != 0
            if parallel or thread == 0:
                call(calls[number, 0], calls[number, 1])
            if parallel or (number + 1 < a.count and calls[number + 1, 2] != 0):
                barrier()

    return body
