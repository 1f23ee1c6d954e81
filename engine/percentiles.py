"""Statistics of latency samples: mean, percentiles, maximum."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from llmsched.engine.errors import LlmschedError

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of samples, in the unit of the samples. Without samples, `count` is 0 and the other fields are None.

    Reports show every field, so a new field, such as `p90`, adds a percentile to all reports.
    """

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


#: Names of the percentiles in a Summary.
PERCENTILES = tuple(f.name for f in fields(Summary) if _PERCENTILE.fullmatch(f.name))


def summarise(samples: Sequence[float]) -> Summary:
    """Return the Summary of samples. Percentiles are interpolated linearly (type 7 of Hyndman and Fan)."""
    if not samples:
        return Summary()
    values = np.asarray(samples, dtype=np.float64)
    found = np.percentile(values, [float(name[1:]) for name in PERCENTILES], method="linear").tolist()
    percentiles = dict(zip(PERCENTILES, found, strict=True))
    return Summary(len(samples), float(values.mean()), max=float(values.max()), **percentiles)


def statistic(samples: Sequence[float], name: str) -> float | None:
    """Return the statistic `name` of the samples: mean, max, or a percentile such as p50 or p99.9.

    Returns None if there are no samples. Raises LlmschedError for an unknown name.
    """
    match = _PERCENTILE.fullmatch(name)
    if name not in ("mean", "max") and (match is None or not float(match[1])):
        raise LlmschedError(f"{name!r} is not a statistic; allowed are mean, max and percentiles such as p50 or p99.9")
    if not samples:
        return None
    if match is None:
        return max(samples) if name == "max" else sum(samples) / len(samples)
    ordered = sorted(samples)
    whole, part = divmod(float(match[1]) / 100 * (len(ordered) - 1), 1)
    low, high = ordered[int(whole)], ordered[min(int(whole) + 1, len(ordered) - 1)]
    return low + part * (high - low)
