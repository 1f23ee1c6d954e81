"""Rounding to fp8 KV caches, in registers."""
# Triton refuses e4m3 for GPUs before compute capability 8.9, which do not convert it. Converting it with integer
# instructions would take so many registers there that attention spills. e5m2 is the first byte of a float16, so all
# GPUs convert it.

# Triton code has no Python types. Names in capitals are compile-time constants.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stored(numbers, scale, TYPE: tl.constexpr, FP8: tl.constexpr):
    """Return `numbers` in the cache's type TYPE, as `kernels.fp8.stored` does."""
    # Numbers are rounded here, which makes the conversion exact: Triton does not round float32 to the nearest number
    # everywhere, for example in its interpreter. In float32, numbers from OFFSET on are as far apart as the subnormal
    # numbers of TYPE, those below SMALLEST.
    if FP8:
        E5M2: tl.constexpr = tl.float8e5 == TYPE
        LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
        SMALLEST: tl.constexpr = 2.0**-14 if E5M2 else 2.0**-6
        OFFSET: tl.constexpr = 2.0**7 if E5M2 else 2.0**14
        SHIFT: tl.constexpr = 21 if E5M2 else 20
        x = numbers.to(tl.float32) * tl.div_rn(1.0, scale)  # exact for powers of two
        size = tl.abs(x)
        bits = size.to(tl.uint32, bitcast=True)
        bits = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) << SHIFT
        rounded = tl.where(size < SMALLEST, (size + OFFSET) - OFFSET, bits.to(tl.float32, bitcast=True))
        rounded = tl.where(rounded > LARGEST, LARGEST, rounded)
        sign = x.to(tl.uint32, bitcast=True) & 0x80000000
        rounded = (rounded.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        numbers = tl.where(x == x, rounded, x)  # NaN stays NaN
    return numbers.to(TYPE)
