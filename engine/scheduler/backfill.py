"""Backfill: later requests may overtake a request that does not fit, a bounded number of times."""

from __future__ import annotations

from collections.abc import Sequence

from llmsched.engine.config import ResolvedConfig
from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Ledger
from llmsched.engine.scheduler.prediction import OutputPredictor
from llmsched.engine.scheduler.waiting_queue import WaitingQueue


class Backfill:
    """Rules for overtaking in the waiting queue.

    The first waiting request may be overtaken `max_passes` times; after that, only this request may be admitted. A
    request that does not fit gets a reserved start: the step at which it is predicted to fit. Until then, requests
    behind it are admitted only if they are predicted to end before the reserved start.
    """

    def __init__(
        self, waiting: WaitingQueue, ledger: Ledger, predictor: OutputPredictor, config: ResolvedConfig
    ) -> None:
        self._waiting = waiting
        self._ledger = ledger
        self._predictor = predictor
        self._max_passes = config.max_passes
        self._prefill_per_step = config.max_num_batched_tokens
        self._reserved: Request | None = None
        self._steps_left = 0  # until the reserved request is predicted to fit

    def new_step(self) -> None:
        self._steps_left -= 1

    def may_pass(self, request: Request) -> bool:
        """Return True if the request may be admitted now although requests ahead of it wait."""
        first, reserved = self._waiting.first, self._reserved
        if first is not request and first.num_passed >= self._max_passes:
            reason = "the first request in the queue has already been overtaken max_passes times"
        elif reserved is None or request.rank <= reserved.rank:
            return True
        else:
            steps = -(-request.num_tokens // self._prefill_per_step) + self._predictor.remaining(request)
            if reserved.num_passed < self._max_passes and steps <= self._steps_left:
                return True
            reason = "memory is reserved for a request ahead of it"
        self._ledger.note(request.request_id, "held back", reason=reason)
        return False

    def reserve(self, request: Request, missing_blocks: int, running: Sequence[Request]) -> None:
        """Reserve a start for a request that lacks `missing_blocks` blocks, unless a request ahead of it has one."""
        if self._reserved is not None and request.rank > self._reserved.rank:
            return
        self._reserved, self._steps_left = request, 0
        for remaining, blocks in sorted((self._predictor.remaining(r), r.table.num_blocks) for r in running):
            self._steps_left = remaining
            missing_blocks -= blocks
            if missing_blocks <= 0:
                break

    def admitted(self, request: Request) -> None:
        """Record that a request is being admitted. Call this while the request is still in the queue."""
        first = self._waiting.first
        if first is not request:
            first.num_passed += 1
            # A tenant must not learn the request ids of other tenants.
            by = request.request_id if request.cache_salt == first.cache_salt else "a request with another cache_salt"
            self._ledger.note(first.request_id, "passed", by=by, by_priority=request.priority, times=first.num_passed)
        self.forget(request)

    def forget(self, request: Request) -> None:
        if self._reserved is request:
            self._reserved = None
