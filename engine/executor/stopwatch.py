"""Measurement of the time that work takes on a device."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Stopwatch that runs from its construction until the call of `stop`.

    On a GPU, the stopwatch measures the work that is queued on the current stream between these two moments. The time
    that the work waits in the queue does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._started = time.perf_counter()
        self._events: list[torch.cuda.Event] = []
        self._mark()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started
        self._mark()

    def seconds(self) -> float:
        """Return the measured time in seconds. On a GPU, first wait until the work has ended."""
        if not self._events:
            return self._seconds
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
