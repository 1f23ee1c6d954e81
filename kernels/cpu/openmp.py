"""Execution of compiled code on torch's own OpenMP threads."""
# Numba's own thread pool, in addition to torch's, would double the number of spinning threads: on two cores, a kernel
# of 0.1 ms then takes up to 8 ms (measured). So GOMP_parallel starts the compiled function, as in code that GCC
# compiles from `#pragma omp parallel`, on torch's threads, which are still awake after the previous matrix product. If
# torch's runtime lacks GOMP_parallel (macOS, Windows), the function runs on the calling thread alone.

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from llmsched.kernels.cpu.compiled import jit

THREAD_NUM_SYMBOL = "llmsched_omp_get_thread_num"
BARRIER_SYMBOL = "llmsched_omp_barrier"


class State(threading.local):
    #: Addresses and arguments of the bodies that this thread runs, and whether on all threads, if it records them (see
    #: recording.py).
    calls: list[tuple[int, Any, bool]] | None = None


state = State()


@cache
def load_runtime() -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch loaded, or None if the runtime lacks GOMP_parallel."""
    if sys.platform != "linux":
        return None
    runtime = ctypes.CDLL(None)
    if not (hasattr(runtime, "GOMP_parallel") and hasattr(runtime, "omp_get_thread_num")):
        return None
    # GOMP_parallel(function, data, num_threads, flags); a call releases the GIL.
    runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    runtime.GOMP_parallel.restype = None
    return runtime


def arguments_type(addresses: Sequence[str], sizes: Sequence[str], floats: Sequence[str] = ()) -> Any:
    """Return a ctypes structure for a compiled function's arguments, with the named fields and a field num_threads.

    `addresses` and `sizes` are names of intp fields, and `floats` of float32 fields. The attribute `dtype` is the NumPy
    type of the structure.
    """
    integers = [(name, ctypes.c_ssize_t) for name in (*addresses, *sizes)]
    fields = [*integers, *((name, ctypes.c_float) for name in floats), ("num_threads", ctypes.c_ssize_t)]
    record = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    record.dtype = np.dtype(record)  # type: ignore[attr-defined]
    return record


def address_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element, or 0 if the tensor is None."""
    return 0 if tensor is None else tensor.data_ptr()


def run(body: Any, arguments: Any, *, parallel: bool) -> None:
    """Call the compiled C function `body` on all of torch's threads, or on the calling thread alone.

    The function gets a pointer to `arguments`, whose class comes from `arguments_type`. If `parallel` is False, the
    work must be short, because the calling thread keeps the GIL.
    """
    # Never fewer than all threads, because libgomp would end the unused threads. Short work keeps the GIL, because
    # another thread would hold a released GIL for longer than the work takes.
    runtime = load_runtime() if parallel else None
    if state.calls is not None:
        state.calls.append((body.address, arguments, runtime is not None))
    if runtime:
        arguments.num_threads = num_threads = torch.get_num_threads()
        runtime.GOMP_parallel(body.address, ctypes.addressof(arguments), num_threads, 0)
    else:
        arguments.num_threads = 1
        alone(body, parallel)(ctypes.addressof(arguments))


@jit()
def own_part(total: int, thread: int, num_threads: int) -> tuple[int, int]:
    """Return the start and the end of one thread's part of `total` items. All parts have about the same size."""
    return total * thread // num_threads, total * (thread + 1) // num_threads


@cache
def alone(body: Any, releases_gil: bool) -> Callable[[int], None]:
    """Wrap the C function `body` in a Python function. If `releases_gil` is True, a call releases the GIL."""
    prototype = ctypes.CFUNCTYPE if releases_gil else ctypes.PYFUNCTYPE
    return prototype(None, ctypes.c_void_p)(body.address)


@intrinsic  # type: ignore[untyped-decorator]
def as_pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address (intp) to a pointer that numba.carray accepts."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call the C function at the address `function` with the address `argument`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


def only_thread() -> int:
    return 0


def nothing() -> None:
    pass


_runtime = load_runtime()
if _runtime is None:
    zero, no_barrier = numba.cfunc(types.int32())(only_thread), numba.cfunc(types.void())(nothing)
    llvm.add_symbol(THREAD_NUM_SYMBOL, zero.address)
    llvm.add_symbol(BARRIER_SYMBOL, no_barrier.address)
else:
    llvm.add_symbol(THREAD_NUM_SYMBOL, ctypes.cast(_runtime.omp_get_thread_num, ctypes.c_void_p).value)
    llvm.add_symbol(BARRIER_SYMBOL, ctypes.cast(_runtime.GOMP_barrier, ctypes.c_void_p).value)
thread_num = types.ExternalFunction(THREAD_NUM_SYMBOL, types.int32())
#: Wait until all threads that run the body have called it. On the calling thread alone it does nothing.
barrier = types.ExternalFunction(BARRIER_SYMBOL, types.void())


@jit()
def wait_for_all(num_threads: int) -> None:
    """Call `barrier()` if the body runs on several threads. Other threads may wait for this one in a recording."""
    if num_threads > 1:
        barrier()
