"""What the queue waits for, so that each request can be told what its own waiting was for."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from llmsched.engine.request import Request


class WaitFor(StrEnum):
    """Why the first in the queue is not let in: too many run, blocks are short, a step has no room for more tokens, or
    running requests are computing what it needs as well.
    """

    SLOT = "slot"
    MEMORY = "memory"
    STEP = "step"
    PREFIX = "prefix"


class Waits:
    """Seconds that the queue has waited for each thing, and of them those since each waiting request came.

    After each step is said what holds until the next. A constant cost per step, however many wait.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(WaitFor, 0.0)
        self._now_for: WaitFor | None = None
        self._since = 0.0
        self._before: dict[Request, dict[WaitFor, float]] = {}

    def now_for(self, what: WaitFor | None) -> None:
        """From now on the queue waits for this; None: nobody waits."""
        self._count()
        self._now_for = what

    def begin(self, request: Request) -> None:
        """The request waits from now on."""
        self._count()
        self._before[request] = self._seconds.copy()

    def end(self, request: Request) -> dict[WaitFor, float]:
        """It does no more; how many seconds it waited for what, at least a thousandth."""
        self._count()
        before = self._before.pop(request, self._seconds)
        waited = {what: seconds - before[what] for what, seconds in self._seconds.items()}
        return {what: seconds for what, seconds in waited.items() if seconds >= 1e-3}

    def _count(self) -> None:
        now = self._clock()
        if self._now_for is not None:
            self._seconds[self._now_for] += now - self._since
        self._since = now
