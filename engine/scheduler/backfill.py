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
        #: Tokens that the latest step with decodes left for prefills. Later steps are assumed to leave as many.
        self.prefill_per_step = config.max_num_batched_tokens
        self._reserved: Request | None = None
        self._steps_left = 0  # until the reserved request is predicted to fit

    def new_step(self) -> None:
        self._steps_left -= 1

    def may_pass(self, request: Request, left: int) -> bool:
        """Return True if the request may be admitted now although requests ahead of it wait.

        `left` is the number of its tokens that the present step can compute.
        """
        first, reserved = self._waiting.first, self._reserved
        if first is not request and first.num_passed >= self._max_passes:
            reason = "the first request in the queue has already been overtaken max_passes times"
        elif reserved is None or request.rank <= reserved.rank:
            return True
        else:
            if reserved.num_passed < self._max_passes and self._num_steps(request, left) <= self._steps_left:
                return True
            reason = "memory is reserved for a request ahead of it"
        self._ledger.note(request.request_id, "held back", reason=reason)
        return False

    def reserve(self, request: Request, missing_blocks: int, running: Sequence[Request]) -> None:
        """Reserve a start for a request that lacks `missing_blocks` blocks, unless an earlier request has a start."""
        if self._reserved is not None and request.rank > self._reserved.rank:
            return
        self._reserved, self._steps_left = request, 0
        left = self.prefill_per_step
        for num_steps, blocks in sorted((self._num_steps(r, left), r.table.num_blocks) for r in running):
            self._steps_left = num_steps
            missing_blocks -= blocks
            if missing_blocks <= 0:
                break

    def _num_steps(self, request: Request, left: int) -> int:
        """Return the number of steps until the request is predicted to end, if this step computes `left` tokens of it.

        The step that computes the rest of the prompt computes the first token of the output too.
        """
        later = max(0, request.num_tokens - request.num_computed_tokens - left)
        return -(-later // self.prefill_per_step) + self._predictor.remaining(request)

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
