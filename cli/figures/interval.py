"""How far a P99 can be trusted: a bootstrap interval over requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_RESAMPLES = 500
_SEED = 0
_SHARE = 0.01

#: Share of the largest samples that are looked at first; a resample whose P99 lies below them looks at all.
_TOP = 0.05


def p99_interval(requests: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The central 95 % of the P99s of samples drawn anew, whole requests with replacement; None for fewer than two.

    Whole requests, because the gaps of one request are not independent of each other (Davison and Hinkley, Bootstrap
    Methods and their Application, 3.8). The same input gives the same interval. No resample exceeds the largest value
    seen, so that with few requests the upper end is too low.
    """
    sizes = np.array([len(samples) for samples in requests if len(samples)])
    if len(sizes) < 2:
        return None
    values = np.concatenate([np.asarray(samples, dtype=np.float64) for samples in requests if len(samples)])
    order = np.argsort(values)[::-1]
    values, owners = values[order], np.repeat(np.arange(len(sizes)), sizes)[order]
    top = max(1, int(_TOP * len(values)))
    generator = np.random.default_rng(_SEED)
    found = np.empty(_RESAMPLES)
    for index in range(_RESAMPLES):
        drawn = np.bincount(generator.integers(0, len(sizes), len(sizes)), minlength=len(sizes))
        beyond = _SHARE * float(drawn @ sizes)
        reached = np.cumsum(drawn[owners[:top]])
        if reached[-1] <= beyond:
            reached = np.cumsum(drawn[owners])
        found[index] = values[np.searchsorted(reached, beyond, side="right")]
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)
