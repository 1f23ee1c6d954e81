"""Lengths and arrivals of a load in figures. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: The window, in seconds, in which arrivals are counted to find the busiest.
PEAK_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class LengthFigures:
    """Tokens per request; `tail` is P99 / mean. Percentiles interpolate between the two nearest samples."""

    mean: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: int
    tail: float


@dataclass(frozen=True, slots=True)
class ArrivalFigures:
    """`rate` in requests per second between first and last; None where all come at one time.

    `gap_cv` is the standard deviation of the gaps / their mean: 1 is Poisson. `peak_over_mean` compares the busiest
    10 s with the mean; None where the load does not last so long.
    """

    duration_s: float
    rate: float | None
    gap_cv: float | None
    peak_over_mean: float | None


def length_figures(lengths: Sequence[int]) -> LengthFigures | None:
    """The figures of some lengths; None if there are none, or nothing but zeros."""
    if not any(lengths):
        return None
    values = np.asarray(lengths)
    p50, p75, p90, p95, p99 = np.percentile(values, (50, 75, 90, 95, 99)).tolist()
    mean = float(values.mean())
    return LengthFigures(mean, p50, p75, p90, p95, p99, int(values.max()), p99 / mean)


def arrival_figures(offsets: Sequence[float]) -> ArrivalFigures:
    """The figures of ascending times in seconds."""
    times = np.asarray(offsets, dtype=np.float64)
    span = float(times[-1] - times[0])
    if span <= 0:
        return ArrivalFigures(0.0, None, None, None)
    gaps, rate = np.diff(times), (len(times) - 1) / span
    peak = None
    if span >= PEAK_WINDOW_S:
        ends = np.searchsorted(times, times + PEAK_WINDOW_S, side="left")
        peak = float((ends - np.arange(len(times))).max()) / (rate * PEAK_WINDOW_S)
    return ArrivalFigures(span, rate, float(gaps.std() / gaps.mean()), peak)
