from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord
from llmsched.cli.load.load import PlannedRequest
from llmsched.engine.core import Timeline
from llmsched.engine.errors import LlmschedError, QueueFullError
from llmsched.engine.request import Request
from llmsched.engine.scheduler.scheduler import Update
from llmsched.engine.simulated_engine import SimulatedEngine

#: Chooses the index of the engine for a request: called with its name, its prompt, the time, and the indices of the
#: engines that have refused it because their queues are full.
Route = Callable[[str, Sequence[int], float, Sequence[int]], int]


def to_first_engine(name: str, prompt: Sequence[int], now: float, refused_by: Sequence[int]) -> int:
    return 0


class SimulatedClients:
    """Clients that send a load to simulated engines and keep records as `run_load` does, but in virtual time.

    `route` chooses the engine for each request. The engines' clocks advance independently: the engine whose next
    eventful step (see SimulatedEngine) begins first runs next. `on_end` is called with the record of each
    request that ends.
    """

    def __init__(
        self,
        planned: Sequence[PlannedRequest],
        engines: Sequence[SimulatedEngine],
        *,
        closed: bool,
        max_concurrency: int | None,
        timeout: float | None,
        stop_after: float | None = None,
        route: Route = to_first_engine,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._start = start = engines[0].clock.now
        self._stop = start + stop_after if closed and stop_after is not None else math.inf
        self._engines = engines
        self._closed = closed
        self._timeout = math.inf if timeout is None else timeout
        self._route = route
        self._on_end = on_end
        self._coming = deque(planned)
        self._free = [start] * (len(planned) if max_concurrency is None else max_concurrency)
        self._running: dict[str, tuple[RequestRecord, Request]] = {}
        #: For each engine: the time at which its next step begins, and the deadlines of its requests, soonest first.
        self._ready = [math.inf] * len(engines)
        self._deadlines: list[deque[tuple[float, str]]] = [deque() for _ in engines]
        self._records: list[RequestRecord] = []

    def run(self, after_step: Callable[[float], None] = lambda now: None) -> list[RequestRecord]:
        """Run the engines until the load ends. Return the records of all requests sent, in the order of sending.

        Call `after_step` after each eventful step, with the time at which it began. Raises CancelledError after such a
        step if Ctrl-C has cancelled the current task.
        """
        try:
            task = asyncio.current_task()
        except RuntimeError:  # outside an event loop
            task = None
        while (index := self._next_engine()) is not None:
            begin = self._engines[index].clock.now
            self._step(index)
            after_step(begin)
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
        return self._records

    def _step(self, index: int) -> None:
        engine = self._engines[index]
        if self._add_decoded(index):
            self._ready[index] = self._next_step(index)
            if self._ready[index] > engine.clock.now:  # more uneventful steps follow
                return
        updates = engine.step()
        self._end_overdue(index)
        now = engine.clock.now
        chunk = Chunk(now, "", 1)
        for update in updates:
            request = update.request
            if (running := self._running.get(request.request_id)) is None:
                continue
            if update.result.token_id is not None:
                running[0].chunks.append(chunk)
            if request.finish_reason is not None:
                self._end(request.request_id, now, _failure(running[0], update), index)
        self._ready[index] = self._next_step(index)

    def _add_decoded(self, index: int) -> bool:
        """Add the tokens of the uneventful steps that an engine has caught up on. Return True if there are any."""
        # This is called before the running requests of the engine change.
        engine = self._engines[index]
        chunks = [Chunk(time, "", 1) for time in engine.take_decoded()]
        if chunks:
            for request in engine.scheduler.running:
                self._running[request.request_id][0].chunks.extend(chunks)
        return bool(chunks)

    def _next_step(self, index: int) -> float:
        """Return when the engine's next step begins that may be eventful; infinity if it has nothing to compute."""
        engine = self._engines[index]
        if not engine.has_work():
            return math.inf
        until = engine.idle_until()
        return engine.look_ahead(self._next_deadline(index)) if until is None else until

    def _next_engine(self) -> int | None:
        """Send due requests, and return the engine whose next step begins first; None if all requests have ended."""
        while True:
            begin, due = min(self._ready), self._next_due()
            if due == begin == math.inf:
                return None
            if due <= begin:
                if due >= self._stop:
                    self._coming.clear()
                else:
                    heappop(self._free)
                    self._send(self._coming.popleft(), due)
                continue
            index = self._ready.index(begin)
            deadline = self._next_deadline(index)
            self._engines[index].wait_until(min(begin, deadline))
            if begin <= deadline:
                return index
            self._end_overdue(index)
            self._ready[index] = self._next_step(index)

    def _next_due(self) -> float:
        """Return when the next request can be sent: at its due time or, if no client is free then, when one is."""
        if not (self._coming and self._free):
            return math.inf
        return max(self._start if self._closed else self._start + self._coming[0].offset, self._free[0])

    def _next_deadline(self, index: int) -> float:
        deadlines = self._deadlines[index]
        return deadlines[0][0] if deadlines else math.inf

    def _send(self, planned: PlannedRequest, now: float) -> None:
        record = RequestRecord(planned.index, scheduled=now if self._closed else self._start + planned.offset)
        record.ready = record.sent = now
        self._records.append(record)
        token_ids = planned.prompt.token_ids
        assert token_ids is not None
        prompt = array("i", token_ids)
        # Padded so that ids sort in the order of arrival, which breaks ties between requests of the same time.
        name = record.request_id = f"bench-{planned.index:09}"
        record.asked_tokens = planned.output_len
        refused_by: list[int] = []
        while True:
            index = self._route(name, prompt, now, refused_by)
            engine = self._engines[index]
            engine.wait_until(now)
            self._add_decoded(index)
            try:
                request = engine.add(name, prompt, planned.output_len, now)
                break
            except LlmschedError as problem:
                refused_by.append(index)
                if isinstance(problem, QueueFullError) and len(refused_by) < len(self._engines):
                    continue
                record.end, record.failure = now, RequestFailed("refused", str(problem))
                heappush(self._free, now)
                self._on_end(record)
                return
        self._running[name] = (record, request)
        if self._timeout < math.inf:
            self._deadlines[index].append((now + self._timeout, name))
        self._ready[index] = self._next_step(index)

    def _end_overdue(self, index: int) -> None:
        engine, deadlines = self._engines[index], self._deadlines[index]
        while deadlines and deadlines[0][0] <= engine.clock.now:
            deadline, name = deadlines.popleft()
            if name in self._running:
                engine.abort(self._running[name][1])
                self._end(name, deadline, RequestFailed("timeout", f"not finished after {self._timeout:g} s"), index)

    def _end(self, name: str, now: float, failure: RequestFailed | None, index: int) -> None:
        record, request = self._running.pop(name)
        record.end, record.failure = now, failure
        record.usage = ReportedUsage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens)
        record.finish_reason = request.finish_reason
        if entries := self._engines[index].scheduler.ledger.entries(name):
            record.timeline = Timeline(0, entries[0].time, entries)
        heappush(self._free, now)
        self._on_end(record)


def _failure(record: RequestRecord, last: Update) -> RequestFailed | None:
    """Return why a request that has ended failed, as `EngineTarget.send` would, or None if it was served."""
    if (error := last.result.error) is not None:
        return RequestFailed("ended by error", error)
    return None if record.chunks else RequestFailed("empty stream", "the request ended without a token")
