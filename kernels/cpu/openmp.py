"""Execution of compiled code on torch's own OpenMP threads.

Numba's own thread pool, in addition to torch's, would double the number of spinning threads: on two cores, a kernel of
0.1 ms then takes up to 8 ms (measured). So GOMP_parallel starts the compiled function, as in code that GCC compiles
from `#pragma omp parallel`, on torch's threads, which are still awake after the previous matrix product. If torch's
runtime lacks GOMP_parallel (macOS, Windows), the function runs on the calling thread alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

THREAD_NUM_SYMBOL = "llmsched_omp_get_thread_num"


@cache
def load_runtime() -> ctypes.CDLL | None:
    """Return the OpenMP runtime that torch loaded into the process, or None if this runtime lacks GOMP_parallel."""
    if sys.platform != "linux":
        return None
    runtime = ctypes.CDLL(None)
    if not (hasattr(runtime, "GOMP_parallel") and hasattr(runtime, "omp_get_thread_num")):
        return None
    # GOMP_parallel(function, data, num_threads, flags); a call releases the GIL.
    runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    runtime.GOMP_parallel.restype = None
    return runtime


def run(body: Any, arguments: np.ndarray[Any, Any], *, parallel: bool) -> None:
    """Call `body`, a numba.cfunc that takes one pointer, on all of torch's threads or on the calling thread.

    `parallel` selects all threads, if torch's runtime has GOMP_parallel. `run` never passes a smaller number to
    GOMP_parallel, because libgomp would end the unused threads. `body` gets a pointer to `arguments`, one record, of
    which `run` sets the field num_threads. In `body`, thread_num() returns the number of the thread.
    """
    runtime = load_runtime() if parallel else None
    arguments["num_threads"] = num_threads = torch.get_num_threads() if runtime else 1
    if runtime:
        runtime.GOMP_parallel(body.address, arguments.ctypes.data, num_threads, 0)
    else:
        alone(body)(arguments.ctypes.data)


@cache
def alone(body: Any) -> Callable[[int], None]:
    """Return a Python function that calls the cfunc `body` and releases the GIL meanwhile."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body.address)


@intrinsic  # type: ignore[untyped-decorator]
def as_pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address (intp) to a pointer that numba.carray accepts."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), codegen


def only_thread() -> int:
    return 0


_runtime = load_runtime()
if _runtime is None:
    zero = numba.cfunc(types.int32())(only_thread)
    llvm.add_symbol(THREAD_NUM_SYMBOL, zero.address)
else:
    llvm.add_symbol(THREAD_NUM_SYMBOL, ctypes.cast(_runtime.omp_get_thread_num, ctypes.c_void_p).value)
thread_num = types.ExternalFunction(THREAD_NUM_SYMBOL, types.int32())
