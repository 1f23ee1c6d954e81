"""Throughput without the ramp at the beginning of a run and without the drain at its end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.figures.token_times import Served
from llmsched.engine.latency import Arrival, steady_rate

#: A steady rate is given if what it is taken from spans at least this share of the run.
STEADY_SHARE = 0.1

Window = tuple[float, float]


def steady_window(records: Sequence[RequestRecord], served: Sequence[Served]) -> Window | None:
    """When the load was at its level, by the clock of the records; None if that was too short to tell anything.

    It begins one median E2E after the start, by when about as many requests end as are sent, and is over with the first
    end after the last request was sent, because from then on fewer and fewer are running. One for which no connection
    could be made counts as sent: a target that has gone is at fault for what it does not serve.
    """
    sent = [at for record in records if (at := record.connecting if record.sent is None else record.sent) is not None]
    ends = [record.end for record in records if record.end is not None]
    if not served or not sent:
        return None
    last_sent = max(sent)
    start = min(record.scheduled for record in records)
    level = start + median(one.latency.e2e for one in served)
    drain = min((end for end in ends if end > last_sent), default=max(ends))
    return (level, drain) if drain - level >= STEADY_SHARE * (max(ends) - start) else None


def steady(arrivals: Sequence[Arrival], window: Window | None, run: Window) -> float | None:
    """The rate from the first arrival within the window to its end, or without one to the end of the whole `run`.

    None where that is too short a time to say anything of the run.
    """
    for low, high in (run,) if window is None else (window, run):
        # A billionth: of times that were added up in another order.
        inside = [arrival for arrival in arrivals if low - 1e-9 <= arrival.time <= high + 1e-9]
        if inside and high - min(inside).time >= STEADY_SHARE * (run[1] - run[0]):
            return steady_rate(inside, high)
    return None
