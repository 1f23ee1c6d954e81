"""Running compiled code on torch's own OpenMP threads.

Numba's thread pools beside torch's would put twice as many spinning threads on the cores: on two cores, a kernel of
0.1 ms then takes up to 8 ms (measured). So a body is started as GCC's compiled `#pragma omp parallel` would start it,
through GOMP_parallel, which LLVM's OpenMP runtime offers too, and torch's threads, warm from the product before, do it.
Where torch brings a runtime without that entry (macOS, Windows), the body runs on the calling thread alone.
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


def load_runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that importing torch put into the process, if it has the entries needed."""
    if sys.platform != "linux":
        return None
    runtime = ctypes.CDLL(None)
    return runtime if hasattr(runtime, "GOMP_parallel") and hasattr(runtime, "omp_get_thread_num") else None


@cache
def parallel_entry() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, data, num_threads, flags). A call releases the GIL."""
    if runtime is None:
        return None
    entry = runtime.GOMP_parallel
    entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    entry.restype = None
    return entry


def run(body: Any, arguments: np.ndarray[Any, Any], *, parallel: bool) -> None:
    """Call `body`, a numba.cfunc of one pointer, on each of torch's threads, or on the calling one alone.

    `arguments` is one record; its field num_threads is set for the body, which finds its own number by thread_num().
    The team is always torch's whole: libgomp ends threads that a smaller team leaves over, and starting them is slow.
    """
    enter = parallel_entry() if parallel else None
    arguments["num_threads"] = torch.get_num_threads() if enter else 1
    if enter:
        enter(body.address, arguments.ctypes.data, torch.get_num_threads(), 0)
    else:
        alone(body)(arguments.ctypes.data)


@cache
def alone(body: Any) -> Callable[[int], None]:
    """A cfunc as Python calls it; the GIL is released meanwhile."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body.address)


@intrinsic  # type: ignore[untyped-decorator]
def as_pointer(typing_context: Any, address: Any) -> Any:
    """An address (intp) as a pointer for numba.carray."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), codegen


def only_thread() -> int:
    return 0


runtime = load_runtime()
if runtime is None:
    zero = numba.cfunc(types.int32())(only_thread)
    llvm.add_symbol(THREAD_NUM_SYMBOL, zero.address)
else:
    llvm.add_symbol(THREAD_NUM_SYMBOL, ctypes.cast(runtime.omp_get_thread_num, ctypes.c_void_p).value)
thread_num = types.ExternalFunction(THREAD_NUM_SYMBOL, types.int32())
