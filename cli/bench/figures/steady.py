"""Throughput without the ramp at the beginning of a run and without the drain at its end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from llmsched.cli.bench.figures.placing import Served
from llmsched.cli.bench.figures.record import RequestRecord
from llmsched.engine.latency import Arrival, steady_rate

#: A steady rate is given if what it is taken from spans at least this share of the run.
STEADY_SHARE = 0.1

Window = tuple[float, float]


def steady_window(records: Sequence[RequestRecord], served: Sequence[Served]) -> Window | None:
    """When the load was at its level, by the clock of the records; None if that was too short to tell anything.

    It begins one median E2E after the start, by when about as many requests end as are sent, and is over with the first
    end after the last request was sent, because from then on fewer and fewer are running.
    """
    sent = [record.sent for record in records if record.sent is not None]
    ends = [record.end for record in records if record.end is not None]
    if not served or not sent:
        return None
    last_sent = max(sent)
    start = min(record.scheduled for record in records)
    level = start + median(one.latency.e2e for one in served)
    drain = min((end for end in ends if end > last_sent), default=max(ends))
    return (level, drain) if drain - level >= STEADY_SHARE * (max(ends) - start) else None


def steady(arrivals: Sequence[Arrival], window: Window | None, duration: float) -> float | None:
    """The rate within the window, or without one from the first arrival to the last.

    None where all came so close together that it says nothing of a run of that `duration` (seconds).
    """
    if window is not None:
        low, high = window[0] - 1e-9, window[1] + 1e-9
        inside = [arrival for arrival in arrivals if low <= arrival.time <= high]
        if (rate := _rate(inside, duration)) is not None:
            return rate
    return _rate(arrivals, duration)


def _rate(arrivals: Sequence[Arrival], duration: float) -> float | None:
    times = [arrival.time for arrival in arrivals]
    if not times or max(times) - min(times) < STEADY_SHARE * duration:
        return None
    return steady_rate(arrivals)
