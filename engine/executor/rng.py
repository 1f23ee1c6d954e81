"""Keys of random numbers, which depend only on a seed and a position.

Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""
# The counter-based generator Philox4x32-10 turns (seed, position) into a key. It has no state, so preemption and
# batching do not change the tokens that a sequence draws. A cheap hash (`hashed` in kernels/reference.py) turns this
# key and a name, such as the index of a token, into a random number.

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def keys(seeds: ListLike[int], positions: ListLike[int]) -> UInt64:
    """Return a random key for each of N pairs (seed, position): two 32-bit words of Philox output, [2, N].

    Seeds are taken modulo 2**64 and may be negative. Positions must be 0 or more.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    low = np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(low)
    return np.stack(philox4x32(low & _LOW, low >> _HALF, zero, zero, key & _LOW, key >> _HALF)[:2])


def philox4x32(
    c0: UInt64, c1: UInt64, c2: UInt64, c3: UInt64, k0: UInt64, k1: UInt64
) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """Return the Philox4x32-10 output for counters (c0..c3) and keys (k0, k1), elementwise in words of 32 bits."""
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
