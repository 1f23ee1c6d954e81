from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain

from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.figures.token_times import served
from llmsched.cli.load.load import PlannedRequest, Send
from llmsched.cli.progress_display import detail
from llmsched.engine.percentiles import statistic
from llmsched.engine.request_latency import RequestLatency
from llmsched.engine.units import human_seconds

#: Number of latest requests that the figures are computed from.
_LATEST = 100

#: Seconds between two updates, so that showing figures does not disturb the measurement.
_INTERVAL_S = 0.2


class LiveFigures:
    """Figures of the latest requests, as text for the progress display."""

    def __init__(self, now: Callable[[], float], tell: Callable[[str], None] = detail) -> None:
        self._now = now
        self._tell = tell
        self._running = 0
        self._ends: deque[float] = deque(maxlen=_LATEST)
        self._latest: deque[RequestLatency] = deque(maxlen=_LATEST)
        self._start = self._told = now()

    def watching(self, send: Send) -> Send:
        """Return a function that calls `send` and keeps count of the requests in flight."""

        async def counted(request: PlannedRequest, record: RequestRecord) -> None:
            self._running += 1
            try:
                await send(request, record)
            finally:
                self._running -= 1

        return counted

    def ended(self, record: RequestRecord) -> None:
        now = self._now()
        self._ends.append(now)
        if (one := served(record, None)) is not None:
            self._latest.append(one.latency)
        if now - self._told >= _INTERVAL_S or not self._running:
            self._told = now
            self._tell(self.sentence())

    def sentence(self) -> str:
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
