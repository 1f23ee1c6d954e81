from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import islice

from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord
from llmsched.cli.load.load import PlannedRequest
from llmsched.engine.core import Timeline
from llmsched.engine.errors import LlmschedError
from llmsched.engine.request import Request
from llmsched.engine.simulated_engine import SimulatedEngine


class SimulatedClients:
    """Clients that send a load to a simulated engine and keep records as `run_load` does, but in virtual time."""

    def __init__(
        self,
        planned: Sequence[PlannedRequest],
        engine: SimulatedEngine,
        *,
        closed: bool,
        max_concurrency: int | None,
        timeout: float | None,
        stop_after: float | None = None,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._start = start = engine.clock.now
        self._stop = start + stop_after if closed and stop_after is not None else math.inf
        self._engine = engine
        self._closed = closed
        self._timeout = timeout
        self._on_end = on_end
        self._coming = deque(planned)
        self._free = [start] * (len(planned) if max_concurrency is None else max_concurrency)
        self._running: dict[str, tuple[RequestRecord, Request]] = {}
        self._deadlines: deque[tuple[float, str]] = deque()
        self._records: list[RequestRecord] = []

    def run(self, after_step: Callable[[], None] = lambda: None) -> list[RequestRecord]:
        """Run the engine until the load ends. Return the records of all requests sent, in the order of sending.

        Call `after_step` after each step. Raises CancelledError after a step if Ctrl-C has cancelled the current task.
        """
        try:
            task = asyncio.current_task()
        except RuntimeError:  # outside an event loop
            task = None
        while self._advance():
            updates = self._engine.step()
            self._end_overdue()
            now = self._engine.clock.now
            chunk = Chunk(now, "", 1)
            for update in updates:
                request = update.request
                if (running := self._running.get(request.request_id)) is None:
                    continue
                if update.result.token_id is not None:
                    running[0].chunks.append(chunk)
                if request.finish_reason is not None:
                    empty = RequestFailed("empty stream", "the request ended without a token")
                    self._end(request.request_id, now, None if running[0].chunks else empty)
            after_step()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
        return self._records

    def _advance(self) -> bool:
        """Send due requests and advance the clock to the next step. Return False if all requests have ended."""
        engine = self._engine
        while True:
            while self._coming and self._free and (due := self._due(self._coming[0])) <= engine.clock.now:
                if due >= self._stop:
                    self._coming.clear()
                else:
                    heappop(self._free)
                    self._send(self._coming.popleft(), due)
            until = engine.idle_until()
            if engine.has_work() and until is None:
                return True
            next_due = [self._due(self._coming[0])] if self._coming and self._free else []
            if until is not None:
                engine.wait_until(min([until, *next_due, *(deadline for deadline, _ in islice(self._deadlines, 1))]))
                self._end_overdue()
            elif next_due:
                engine.wait_until(next_due[0])
            else:
                return False

    def _due(self, planned: PlannedRequest) -> float:
        """Return when a request can be sent: at its due time or, if no client was free then, when one became free."""
        return max(self._start if self._closed else self._start + planned.offset, self._free[0])

    def _send(self, planned: PlannedRequest, now: float) -> None:
        record = RequestRecord(planned.index, scheduled=now if self._closed else self._start + planned.offset)
        record.ready = record.sent = now
        self._records.append(record)
        prompt = planned.prompt.token_ids
        assert prompt is not None
        # Padded so that ids sort in the order of arrival, which breaks ties between requests of the same time.
        name = record.request_id = f"bench-{planned.index:09}"
        record.asked_tokens = planned.output_len
        try:
            request = self._engine.add(name, prompt, planned.output_len, now)
        except LlmschedError as problem:
            record.end, record.failure = now, RequestFailed("refused", str(problem))
            heappush(self._free, now)
            self._on_end(record)
            return
        self._running[name] = (record, request)
        if self._timeout is not None:
            self._deadlines.append((now + self._timeout, name))

    def _end_overdue(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._engine.clock.now:
            deadline, name = self._deadlines.popleft()
            if name in self._running:
                self._engine.abort(self._running[name][1])
                self._end(name, deadline, RequestFailed("timeout", f"not finished after {self._timeout:g} s"))

    def _end(self, name: str, now: float, failure: RequestFailed | None) -> None:
        record, request = self._running.pop(name)
        record.end, record.failure = now, failure
        record.usage = ReportedUsage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens)
        record.finish_reason = request.finish_reason
        if entries := self._engine.scheduler.ledger.entries(name):
            record.timeline = Timeline(0, entries[0].time, entries)
        heappush(self._free, now)
        self._on_end(record)
