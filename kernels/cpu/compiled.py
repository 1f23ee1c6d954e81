"""Numba compilation, and small functions that the CPU kernels share."""
# Numba keeps compiled code on disk, one version for each processor and each version of Numba. It recompiles a function
# when the function's own file changes, but not when a function that it calls changes. So its directory here has a name
# that depends on the text of all CPU kernels.

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import platformdirs
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Function = TypeVar("Function", bound=Callable[..., Any])

_functions: list[Any] = []
_c_functions: list[str] = []

CACHE_LINE = 64
REORDER = {"reassoc", "contract", "arcp", "nsz"}  # sums may be vectorised; infinity and NaN keep their meaning
EXACT = {"contract"}

# Types in which compiled code reads a cache: Numba has no other floats than these on a CPU, so it reads their bits.
ELEMENTS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
    torch.float8_e4m3fn: np.dtype(np.uint8),
    torch.float8_e5m2: np.dtype(np.int8),
}


class Fp8(NamedTuple):
    """Format of an fp8 type. An exponent of 0 stands for subnormal numbers."""

    largest: float
    mantissa: int  # bits
    bias: int  # of the exponent
    special: int  # magnitudes from here on, as bits, are infinity or NaN


FP8 = {types.uint8: Fp8(448.0, 3, 7, 0x7F), types.int8: Fp8(57344.0, 2, 15, 0x7C)}  # by Numba's type in ELEMENTS


def directory_of(sources: Path) -> Path:
    """Return the user's cache directory for the compiled code of the modules in the directory `sources`."""
    text = b"".join(source.read_bytes() for source in sorted(sources.glob("*.py")))
    return platformdirs.user_cache_path("llmsched") / "kernels" / hashlib.sha256(text).hexdigest()[:16]


if not numba.config.CACHE_DIR:  # the user has not set NUMBA_CACHE_DIR
    numba.config.CACHE_DIR = str(directory_of(Path(__file__).parent))
#: True if no compiled code was on disk when this module was imported.
STARTS_EMPTY = not any(Path(numba.config.CACHE_DIR).glob("*/*.nbc"))


def jit(fastmath: set[str] = REORDER) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function when it is first called. The compiled code releases the GIL.

    `fastmath` is a set of LLVM's fast-math flags.
    """

    def decorate(function: Function) -> Function:
        options = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
        compiled = with_cache(lambda **cache: numba.njit(**options, **cache)(function))
        _functions.append(compiled)
        return compiled  # type: ignore[no-any-return]

    return decorate


def c_function(argument: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that immediately compiles a function to a C function `void f(argument)`.

    The attribute `address` of the result is a pointer to the C function.
    """

    def decorate(function: Callable[..., None]) -> Any:
        _c_functions.append(function.__name__)
        return with_cache(lambda **cache: numba.cfunc(types.void(argument), **cache)(function))

    return decorate


def num_compiled() -> int:
    return len(_c_functions) + sum(len(function.overloads) for function in _functions)


def with_cache(build: Callable[..., Any]) -> Any:
    try:
        return build(cache=True)
    except RuntimeError:  # Numba found no directory for its cache
        return build()


def to_float32(element: Any) -> Any:
    """Convert a float32, or the bits of another type (see ELEMENTS), to float32."""
    raise NotImplementedError("compiled code only")


@overload(to_float32)  # type: ignore[untyped-decorator]
def choose_conversion(element: Any) -> Any:
    if element in FP8:
        return from_fp8(FP8[element])
    return {types.float32: from_float32, types.uint16: from_bfloat16, types.int16: from_float16}[element]


def from_float32(element: Any) -> Any:
    return element


def from_bfloat16(element: Any) -> Any:
    return np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)


def from_float16(element: Any) -> Any:
    bits = np.uint32(np.uint16(element))
    magnitude = np.uint32(np.uint32(bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32)
    magnitude = np.float32(magnitude * np.float32(2.0**112))
    if (bits & np.uint32(0x7C00)) == np.uint32(0x7C00):  # infinity or NaN
        magnitude = np.uint32(magnitude.view(np.uint32) | np.uint32(0x7F800000)).view(np.float32)
    return -magnitude if bits & np.uint32(0x8000) else magnitude


def from_fp8(format: Fp8) -> Callable[[Any], Any]:
    """Return a function that converts the bits of an fp8 number to float32."""
    # The bits, moved to the place of a float32's, are a float32 that is too small by a power of two.
    shift, factor = np.uint32(23 - format.mantissa), np.float32(2.0 ** (127 - format.bias))
    special = np.uint32(format.special)

    def convert(element: Any) -> Any:
        bits = np.uint32(np.uint8(element))
        size = np.uint32(bits & np.uint32(0x7F))
        magnitude = np.float32(np.uint32(size << shift).view(np.float32) * factor)
        if size >= special:
            magnitude = np.uint32(np.uint32(size << shift) | np.uint32(0x7F800000)).view(np.float32)
        return -magnitude if bits & np.uint32(0x80) else magnitude

    return convert


def put(array: Any, index: int, value: Any) -> None:
    """Set array[index] to a float32 value, or to the bits of the value in the array's type (see ELEMENTS)."""
    raise NotImplementedError("compiled code only")


@overload(put)  # type: ignore[untyped-decorator]
def choose_rounding(array: Any, index: Any, value: Any) -> Any:
    if array.dtype in FP8:
        return put_fp8(FP8[array.dtype])
    return {types.float32: put_float32, types.uint16: put_bfloat16}[array.dtype]


def put_float32(array: Any, index: Any, value: Any) -> None:
    array[index] = value


def put_bfloat16(array: Any, index: Any, value: Any) -> None:
    """Set array[index] to the bits of the bfloat16 nearest to `value`. Ties are rounded to even. A NaN stays a NaN."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16)
    is_nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    array[index] = np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


def put_fp8(format: Fp8) -> Callable[[Any, Any, Any], None]:
    """Return a function that rounds a float32 as kernels/fp8.py says, and writes its bits to an array."""
    largest, smallest_normal = np.float32(format.largest), np.float32(2.0 ** (1 - format.bias))
    shift = np.uint32(23 - format.mantissa)
    rebias, half = np.uint32((127 - format.bias) << 23), np.uint32((1 << (22 - format.mantissa)) - 1)
    # In float32, numbers from `offset` on are as far apart as the subnormal numbers of the type.
    offset = np.float32(2.0 ** (24 - format.bias - format.mantissa))
    offset_bits = np.float32(offset).view(np.uint32)

    def put(array: Any, index: Any, value: Any) -> None:
        magnitude = abs(value)
        magnitude = largest if magnitude > largest else magnitude
        bits = np.float32(magnitude).view(np.uint32)
        odd = np.uint32(bits >> shift) & np.uint32(1)
        code = np.uint32(np.uint32(np.uint32(np.uint32(bits - rebias) + half) + odd) >> shift)
        if magnitude < smallest_normal:
            code = np.uint32(np.float32(magnitude + offset).view(np.uint32) - offset_bits)
        if bits > np.uint32(0x7F800000):  # NaN
            code = np.uint32(0x7F)
        sign = np.uint32(np.float32(value).view(np.uint32) >> np.uint32(24)) & np.uint32(0x80)
        array[index] = np.uint8(code | sign)

    return put


@jit(EXACT)
def exp32(x: Any) -> Any:
    """Return exp(x) for x <= 0, accurate to about one unit in the last place. Below -87 the result is exp(-87)."""
    # Unlike math.exp, it lets LLVM vectorise loops. As in Cephes' expf, x is split into k ln 2 + r, and a polynomial
    # gives exp(r).
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
    """Return tanh(x), computed as in Cephes' tanhf."""
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


@jit(EXACT)
def erf32(x: Any) -> Any:
    """Return erf(x) with an error of at most 2e-7 (Abramowitz and Stegun, formula 7.1.26)."""
    size = abs(x)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * size)
    y = np.float32(1.061405429)
    y = y * t - np.float32(1.453152027)
    y = y * t + np.float32(1.421413741)
    y = y * t - np.float32(0.284496736)
    y = y * t + np.float32(0.254829592)
    y = np.float32(1) - y * t * exp32(-size * size)
    return -y if x < np.float32(0) else y


@intrinsic  # type: ignore[untyped-decorator]
def prefetch_line(typing_context: Any, array: Any, offset: Any) -> Any:
    """Prefetch the cache line that holds byte `offset` of a contiguous array."""

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
    """Prefetch rows first to end - 1 of a contiguous matrix."""
    row_bytes = array.shape[1] * array.itemsize
    for offset in range(first * row_bytes, end * row_bytes, CACHE_LINE):
        prefetch_line(array, offset)
