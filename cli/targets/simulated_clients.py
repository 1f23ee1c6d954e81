"""The engine on a virtual clock as a target: the same load, the same records, seconds that nobody has to wait for."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import islice

from llmsched.cli.figures.record import Chunk, RequestFailed, RequestRecord, TokenUsage
from llmsched.cli.load.load import PlannedRequest
from llmsched.engine.core import Timeline
from llmsched.engine.errors import LlmschedError
from llmsched.engine.request import Request
from llmsched.engine.scheduler.scheduler import Update
from llmsched.engine.simulated_engine import SimulatedEngine

_EMPTY = RequestFailed("empty stream", "the request ended without a token")


def simulate_load(
    planned: Sequence[PlannedRequest],
    engine: SimulatedEngine,
    *,
    closed: bool,
    max_concurrency: int | None,
    timeout: float | None,
    stop_after: float | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
    after_step: Callable[[], None] = lambda: None,
) -> list[RequestRecord]:
    """What `run_load` does, on the engine's clock: a record of each request that is sent, in the order of `planned`.

    Raises CancelledError when the task that runs it was cancelled (Ctrl-C): it has no other moment to hear of that.
    """
    run, task = _Run(planned, engine, closed, max_concurrency, timeout, stop_after, on_end), _this_task()
    while run.go_on():
        run.take(engine.step())
        after_step()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
    return run.records


def _this_task() -> asyncio.Task[object] | None:
    """The task that this runs in, None outside of an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class _Run:
    """The clients of a load. A request takes the slot that came free first, at that time or when it is due, if later.

    `_free` are the times since which slots are free, `_living` what was sent and has not ended, `_deadlines` when those
    are given up.
    """

    def __init__(
        self,
        planned: Sequence[PlannedRequest],
        engine: SimulatedEngine,
        closed: bool,
        max_concurrency: int | None,
        timeout: float | None,
        stop_after: float | None,
        on_end: Callable[[RequestRecord], None],
    ) -> None:
        start = engine.now
        self.records: list[RequestRecord] = []
        self._start = start
        self._stop = start + stop_after if closed and stop_after is not None else math.inf
        self._engine = engine
        self._closed = closed
        self._timeout = timeout
        self._on_end = on_end
        self._coming = deque(planned)
        self._free = [start] * (len(planned) if max_concurrency is None else max_concurrency)
        self._living: dict[str, tuple[RequestRecord, Request]] = {}
        self._deadlines: deque[tuple[float, str]] = deque()

    def go_on(self) -> bool:
        """Send what is due, and let time pass until there is something to compute; False when all has ended."""
        engine = self._engine
        while True:
            self._send_due()
            until = engine.idle_until()
            if engine.has_work() and until is None:
                return True
            next_due = [self._due(self._coming[0])] if self._coming and self._free else []
            if until is not None:
                engine.wait_until(min([until, *next_due, *(deadline for deadline, _ in islice(self._deadlines, 1))]))
                self._give_up()
            elif next_due:
                engine.wait_until(next_due[0])
            else:
                return False

    def take(self, updates: Sequence[Update]) -> None:
        """Note what a step has brought."""
        self._give_up()
        now = self._engine.now
        chunk = Chunk(now, "", 1)
        for update in updates:
            request = update.request
            if (living := self._living.get(request.request_id)) is None:
                continue
            if update.result.token_id is not None:
                living[0].chunks.append(chunk)
            if request.finish_reason is not None:
                self._end(request.request_id, now, None if living[0].chunks else _EMPTY)

    def _due(self, planned: PlannedRequest) -> float:
        """When it can be sent: when it shall be, but not before a slot is free."""
        return max(self._start if self._closed else self._start + planned.offset, self._free[0])

    def _send_due(self) -> None:
        now = self._engine.now
        while self._coming and self._free and (due := self._due(self._coming[0])) <= now:
            if due >= self._stop:
                self._coming.clear()
                return
            planned = self._coming.popleft()
            heappop(self._free)
            record = RequestRecord(planned.index, scheduled=due if self._closed else self._start + planned.offset)
            record.ready = record.sent = due
            self.records.append(record)
            self._send(planned, record, due)

    def _send(self, planned: PlannedRequest, record: RequestRecord, now: float) -> None:
        prompt = planned.prompt.token_ids
        assert prompt is not None
        # The padding makes names sort as the requests came: of those that come at one time the first goes first.
        name = record.request_id = f"bench-{planned.index:09}"
        record.asked_tokens = planned.output_len
        try:
            request = self._engine.add(name, prompt, planned.output_len, now)
        except LlmschedError as problem:
            record.end, record.failure = now, RequestFailed("refused", str(problem))
            heappush(self._free, now)
            self._on_end(record)
            return
        self._living[name] = (record, request)
        if self._timeout is not None:
            self._deadlines.append((now + self._timeout, name))

    def _give_up(self) -> None:
        """End those that have taken longer than the timeout; what comes for them later is not seen."""
        while self._deadlines and self._deadlines[0][0] <= self._engine.now:
            deadline, name = self._deadlines.popleft()
            if name in self._living:
                self._engine.abort(self._living[name][1])
                self._end(name, deadline, RequestFailed("timeout", f"no end after {self._timeout:g} s"))

    def _end(self, name: str, now: float, failure: RequestFailed | None) -> None:
        record, request = self._living.pop(name)
        record.end, record.failure = now, failure
        record.usage = TokenUsage(request.num_prompt_tokens, request.num_cached_tokens, request.num_output_tokens)
        record.finish_reason = request.finish_reason
        if entries := self._engine.entries(name):
            record.timeline = Timeline(0, entries[0].time, entries)
        heappush(self._free, now)
        self._on_end(record)
