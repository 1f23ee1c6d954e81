"""Random numbers that depend on nothing but (seed, position): Philox4x32-10, a counter-based generator.

A counter-based generator has no state to keep, copy or lose: number `position` of stream `seed` is a pure function, so
a preempted, moved or re-batched sequence draws what it would have drawn anyway.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def uniform(seeds: ListLike[int], positions: ListLike[int]) -> npt.NDArray[np.float64]:
    """One number of [0, 1) with 53 random bits for each pair (seed, position).

    A seed is taken modulo 2**64 (so negative ones are fine); positions are 0 or more.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    low = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(low)
    first, second, _, _ = philox4x32(low & _LOW, low >> _HALF, zero, zero, key & _LOW, key >> _HALF)
    bits = (first >> np.uint64(5)) * np.uint64(1 << 26) + (second >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def philox4x32(
    c0: UInt64, c1: UInt64, c2: UInt64, c3: UInt64, k0: UInt64, k1: UInt64
) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """Philox4x32-10 of counters (c0..c3) under keys (k0, k1), element by element; every word is 32 bits wide."""
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3
