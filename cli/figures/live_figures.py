"""The figures of a run while it is running."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.figures.token_times import served
from llmsched.cli.load.load import PlannedRequest, Send
from llmsched.cli.progress import detail
from llmsched.engine.latency import RequestLatency, statistic
from llmsched.engine.units import human_seconds

#: The latest requests, from which the figures are taken.
_LATEST = 100

#: Seconds between two looks, so that telling does not get in the way of measuring.
_INTERVAL_S = 0.2


class LiveFigures:
    """Counts requests as they begin and end, and tells how things stand by `tell`."""

    def __init__(self, now: Callable[[], float], tell: Callable[[str], None] = detail) -> None:
        self._now = now
        self._tell = tell
        self._running = 0
        self._ends: deque[float] = deque(maxlen=_LATEST)
        self._latest: deque[RequestLatency] = deque(maxlen=_LATEST)
        self._start = self._told = now()

    def watching(self, send: Send) -> Send:
        """The same, counted."""

        async def counted(request: PlannedRequest, record: RequestRecord) -> None:
            self._running += 1
            try:
                await send(request, record)
            finally:
                self._running -= 1

        return counted

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, well or not."""
        now = self._now()
        self._ends.append(now)
        if (one := served(record, None)) is not None:
            self._latest.append(one.latency)
        if now - self._told >= _INTERVAL_S or not self._running:
            self._told = now
            self._tell(self.sentence())

    def sentence(self) -> str:
        """Rate, requests under way, and the medians of the latest requests."""
        since = self._ends[0] if len(self._ends) == _LATEST else self._start
        parts = [f"{self._running} running"]
        if (elapsed := self._now() - since) > 0:
            parts.insert(0, f"{len(self._ends) / elapsed:.3g} requests/s")
        ttft = statistic([latency.ttft for latency in self._latest], "p50")
        itl = statistic(list(chain.from_iterable(latency.itl for latency in self._latest)), "p50")
        for name, value in (("TTFT", ttft), ("ITL", itl)):
            if value is not None:
                parts.append(f"{name} P50 {human_seconds(value)}")
        return ", ".join(parts)
