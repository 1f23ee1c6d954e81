"""Going before others: requests that fit pass one that does not, a bounded number of times."""

from __future__ import annotations

from collections.abc import Sequence

from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Ledger
from llmsched.engine.scheduler.peak_memory import Admission, Reservation
from llmsched.engine.scheduler.waiting import WaitingQueue


class Passing:
    """Keeps who is passed, how often, and the reservation of the first by rank that did not fit.

    A request that is not the first by rank passes that one when it is admitted, for whatever reason it goes before it:
    the fast lane, waiting time, a cache hit, or that it fits. The first is passed at most `max_passes` times in all;
    from then on it alone may be admitted.
    """

    def __init__(self, waiting: WaitingQueue, ledger: Ledger, max_passes: int) -> None:
        self._waiting = waiting
        self._ledger = ledger
        self._max_passes = max_passes
        self._reservation: Reservation | None = None

    def new_step(self) -> None:
        """The reserved place comes nearer, by one token of those that run."""
        if self._reservation is not None:
            self._reservation.steps -= 1

    def may_go(self, request: Request, admission: Admission) -> bool:
        """Whether nobody is passed by this request who was passed too often, or whose place it would take."""
        first, reserved = self._waiting.first, self._reservation
        if first is not request and first.num_passed >= self._max_passes:
            self._ledger.note(request.request_id, "held back", reason="the first in the queue was passed often enough")
            return False
        if reserved is None or request.rank <= reserved.request.rank or admission.may_pass(request, reserved):
            return True
        self._ledger.note(request.request_id, "held back", reason="the place is kept for one in front of it")
        return False

    def blocked(self, request: Request, shortage: int, running: Sequence[Request], admission: Admission) -> None:
        """A request lacks `shortage` blocks: keep a place for it, unless one is kept for another in front of it."""
        if self._reservation is None or request.rank <= self._reservation.request.rank:
            self._reservation = admission.reserve(request, running, shortage)

    def goes(self, request: Request) -> None:
        """A request that still waits is admitted: book whom it passes. Tenants do not learn each other's ids."""
        first = self._waiting.first
        if first is not request:
            first.num_passed += 1
            by = request.request_id if request.cache_salt == first.cache_salt else "a request with another cache_salt"
            self._ledger.note(first.request_id, "passed", by=by, by_priority=request.priority, times=first.num_passed)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """The request waits no longer."""
        if self._reservation is not None and self._reservation.request is request:
            self._reservation = None
