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
    if FP8:
        LARGEST: tl.constexpr = 57344.0 if tl.float8e5 == TYPE else 448.0
        x = numbers.to(tl.float32) * tl.div_rn(1.0, scale)  # exact for powers of two
        numbers = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))  # keeps NaN
    return numbers.to(TYPE)
