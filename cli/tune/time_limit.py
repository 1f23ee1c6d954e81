"""Time limit of a search for settings."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from llmsched.cli.tune.knobs import Setting

#: Share of the time limit for short runs. The rest is for full runs of the best settings.
FOR_SHORT_RUNS = 0.6


class OutOfTimeError(Exception):
    """Error that is raised if the time limit of the search ends a run before it is complete."""


class TimeLimit:
    """Time limit in seconds, which starts when the object is created. The event loop's clock measures it.

    It estimates the duration of a run from earlier runs, and never prevents the first run. `was_hit` becomes True when
    the limit ends or prevents a run.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.was_hit = False
        self._seconds = seconds
        self._now = asyncio.get_running_loop().time
        self._start = self._now()
        self._pace: dict[Setting, float] = {}  # seconds per request in the latest run

    @property
    def is_first_run(self) -> bool:
        return not self._pace

    @property
    def passed(self) -> bool:
        return not self.is_first_run and self._now() - self._start >= self._seconds

    def record(self, setting: Setting, requests: int, seconds: float) -> None:
        """Record the duration of a run of `requests` requests."""
        self._pace[setting] = seconds / requests

    def allows(self, settings: Sequence[Setting], requests: int, share: float = 1.0) -> bool:
        """Return True if runs of the settings will probably end within `share` of the limit. Else set `was_hit`."""
        if self.is_first_run:
            return True
        typical = sum(self._pace.values()) / len(self._pace)
        expected = sum(self._pace.get(setting, typical) for setting in settings) * requests
        if self._now() - self._start + expected <= share * self._seconds:
            return True
        self.was_hit = True
        return False
