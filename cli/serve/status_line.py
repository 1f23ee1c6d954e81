from __future__ import annotations

import asyncio
import logging

from llmsched.cli.live_stats import stats_body, status_line
from llmsched.engine.recent_stats import RecentStats

logger = logging.getLogger(__name__)


async def log_status(recent: RecentStats, interval_s: float) -> None:
    """Log a line every `interval_s` seconds if the engine computed something in that time."""
    meter = StatusMeter(recent)
    while True:
        await asyncio.sleep(interval_s)
        if line := meter.line():
            logger.info("%s", line)


class StatusMeter:
    """Meter of an engine's speed, cache hits and latency between two calls of `line()`."""

    def __init__(self, recent: RecentStats) -> None:
        self._recent = recent
        self._last = recent.look()

    def line(self) -> str:
        """Return the status since the last call as text, or "" if the engine has computed nothing since then."""
        before, self._last = self._last, self._recent.look()
        return "" if self._last.stats.steps == before.stats.steps else status_line(stats_body(before, self._last))
