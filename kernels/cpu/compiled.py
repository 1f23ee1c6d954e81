"""How this package compiles with Numba, and the small functions its kernels are made of.

Compiled code is kept on disk (beside the source, or in the user's cache where that is read-only); where neither can be
written, each process compiles for itself. Numba compiles anew when the file of the compiled function changes, not when
one that it calls does: whoever edits this file removes the *.nbi and *.nbc files in __pycache__.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Function = TypeVar("Function", bound=Callable[..., Any])

CACHE_LINE = 64
REORDER = {"reassoc", "contract", "arcp", "nsz"}  # sums may be vectorised; infinity and NaN keep their meaning
EXACT = {"contract"}

# What compiled code reads a cache as: Numba knows neither bfloat16 nor float16 on a CPU, so these come as their bits.
ELEMENTS = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
}


def jit(fastmath: set[str] = REORDER) -> Callable[[Function], Function]:
    """Compile on the first call; the GIL is released while the function runs."""

    def decorate(function: Function) -> Function:
        options = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
        return with_cache(lambda **cache: numba.njit(**options, **cache)(function))  # type: ignore[no-any-return]

    return decorate


def c_function(argument: Any) -> Callable[[Callable[..., None]], Any]:
    """Compile now, as a C function `void f(argument)`; the result's `.address` is its entry."""

    def decorate(function: Callable[..., None]) -> Any:
        return with_cache(lambda **cache: numba.cfunc(types.void(argument), **cache)(function))

    return decorate


def with_cache(build: Callable[..., Any]) -> Any:
    try:
        return build(cache=True)
    except RuntimeError:  # Numba found no place to keep it
        return build()


def to_float32(element: Any) -> Any:
    """A float32, or the float32 that bfloat16 (uint16) or float16 (int16) bits stand for."""
    raise NotImplementedError("compiled code only")


@overload(to_float32)  # type: ignore[untyped-decorator]
def choose_conversion(element: Any) -> Any:
    return {types.float32: from_float32, types.uint16: from_bfloat16, types.int16: from_float16}[element]


def from_float32(element: Any) -> Any:
    return element


def from_bfloat16(element: Any) -> Any:
    return np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)


def from_float16(element: Any) -> Any:
    """Exponent and mantissa move to where float32 has them; the product mends the bias, also of subnormal numbers."""
    bits = np.uint32(np.uint16(element))
    magnitude = np.uint32(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32)
    magnitude = np.float32(magnitude * np.float32(2.0**112))
    if (bits & np.uint32(0x7C00)) == np.uint32(0x7C00):  # infinity or NaN
        magnitude = np.uint32(magnitude.view(np.uint32) | np.uint32(0x7F800000)).view(np.float32)
    return -magnitude if bits & np.uint32(0x8000) else magnitude


@jit(EXACT)
def exp32(x: Any) -> Any:
    """exp(x) for x <= 0 to about one unit in the last place; a loop over it is vectorised, as over math.exp it is not.

    Cephes' expf: x = k ln 2 + r, with ln 2 in two parts, and a polynomial in r. Below -87 it stays at exp(-87).
    """
    x = np.float32(-87) if x < np.float32(-87) else x
    k = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - k * np.float32(0.693359375)
    r = r - k * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1)
    power_of_two = np.int32(np.int32(np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
    return y * power_of_two


@jit(EXACT)
def tanh32(x: Any) -> Any:
    """tanh(x), Cephes' tanhf: a polynomial near zero, else from the exponential."""
    square = x * x
    y = np.float32(-5.70498872745e-3)
    y = y * square + np.float32(2.06390887954e-2)
    y = y * square + np.float32(-5.37397155531e-2)
    y = y * square + np.float32(1.33314422036e-1)
    y = y * square + np.float32(-3.33332819422e-1)
    near = y * square * x + x
    decay = exp32(np.float32(-2) * abs(x))
    far = (np.float32(1) - decay) / (np.float32(1) + decay)
    far = -far if x < np.float32(0) else far
    return near if abs(x) < np.float32(0.625) else far


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_line(typing_context: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line that holds byte `offset` of a contiguous array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte_pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.gep(builder.bitcast(data, byte_pointer), [args[1]])
        prototype = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
        prefetch = cgutils.get_or_insert_function(builder.module, prototype, "llvm.prefetch.p0")
        read, keep_in_all_levels, data_not_code = int32(0), int32(3), int32(1)
        builder.call(prefetch, [address, read, keep_in_all_levels, data_not_code])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@jit()
def prefetch_rows(array: Any, first: int, end: int) -> None:
    """Ask for rows first..end - 1 of a contiguous matrix."""
    row_bytes = array.shape[1] * array.itemsize
    for offset in range(first * row_bytes, end * row_bytes, CACHE_LINE):
        prefetch_line(array, offset)
