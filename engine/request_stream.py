"""Streams that carry the outputs of requests to their readers on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from itertools import chain

from llmsched.engine.errors import LlmschedError
from llmsched.engine.request import ChoiceRecord, RequestOutput

logger = logging.getLogger(__name__)


class RequestStream(AsyncIterator[RequestOutput], AbstractAsyncContextManager["RequestStream"]):
    """Asynchronous iterator over the outputs of one request until all choices have ended.

    It raises EngineDeadError if the engine fails, and RequestError or QueueFullError if the engine refuses the request.
    Leaving the stream's `async with` block early aborts the request. For use on the event loop only.
    """

    def __init__(self, request_id: str, num_choices: int, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._unfinished = num_choices
        self._abort = abort
        self._unread: dict[int, RequestOutput] = {}  # one output per choice; newer outputs are merged into it
        self.error: LlmschedError | None = None
        self.ready = asyncio.Event()  # set when there is something to `take`
        self.wakes_at_end = False  # sets `ready` only when a choice or the stream has ended
        self.pass_on: Callable[[RequestOutput], bool] | None = None  # gets each output first; True counts as read
        self.records: list[ChoiceRecord] = []  # of the choices that have ended
        self.on_end: Callable[[], None] = lambda: None  # called when all choices have ended or the stream has failed

    def deliver(self, output: RequestOutput) -> None:
        if output.record is not None:
            self.records.append(output.record)
        try:
            if self.pass_on is not None and self.pass_on(output):
                return
        except Exception:  # the reader meets the error when it handles the output
            self.pass_on = None
        if (unread := self._unread.get(output.index)) is None:
            self._unread[output.index] = output
        else:
            _merge(unread, output)
        if output.finish_reason is not None:
            self._unfinished -= 1
        elif self.wakes_at_end:
            return
        self.ready.set()

    def fail(self, error: LlmschedError) -> None:
        """End the stream with an error, which the reader gets after the unread outputs."""
        self.error = error
        self.ready.set()

    def take(self) -> list[RequestOutput]:
        """Return the unread outputs, merged into at most one per choice."""
        outputs = list(self._unread.values())
        self._unread.clear()
        return outputs

    @property
    def finished(self) -> bool:
        """True if all choices have ended or the stream has failed; outputs may still be unread."""
        return self._unfinished == 0 or self.error is not None

    def abort(self) -> None:
        if not self.finished:
            self._abort(self.request_id)

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self.error is not None:
                raise self.error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self.ready.clear()
            await self.ready.wait()
        return self._unread.pop(next(iter(self._unread)))

    async def __aexit__(self, *_: object) -> None:
        self.abort()


class OpenStreams(dict[str, RequestStream]):
    """Streams of the requests that have not ended, by request id. For use on the event loop only, except `post`."""

    def __init__(self) -> None:
        super().__init__()
        #: Outputs of steps that have not been delivered yet, and whether `deliver` has been asked for.
        self.posted: deque[list[RequestOutput]] = deque()
        self._delivery_is_due = False
        #: Set while no stream is open.
        self.idle = asyncio.Event()
        self.idle.set()

    def add(self, stream: RequestStream) -> None:
        self[stream.request_id] = stream
        self.idle.clear()

    def post(self, outputs: list[RequestOutput]) -> bool:
        """Add a step's outputs, in the engine's thread. Return True if the event loop must be told to `deliver`."""
        self.posted.append(outputs)
        if self._delivery_is_due:  # not written then, because `deliver` may be resetting it
            return False
        self._delivery_is_due = True
        return True

    def deliver(self) -> None:
        """Hand the posted outputs to their streams. Outputs of the same choice are joined."""
        self._delivery_is_due = False  # before the outputs are read, so that nothing stays posted
        steps = [self.posted.popleft() for _ in range(len(self.posted))]
        for output in steps[0] if len(steps) == 1 else _merged(steps):
            if (stream := self.get(output.request_id)) is not None:
                stream.deliver(output)
                self._close_if_finished(stream)

    def fail(self, request_id: str, error: LlmschedError) -> None:
        if (stream := self.get(request_id)) is not None:
            stream.fail(error)
            self._close_if_finished(stream)

    def _close_if_finished(self, stream: RequestStream) -> None:
        if stream.finished:
            del self[stream.request_id]
            try:
                stream.on_end()
            except Exception:  # other streams must get their outputs
                logger.exception("the end of request %s could not be recorded", stream.request_id)
            if not self:
                self.idle.set()


def _merged(steps: list[list[RequestOutput]]) -> Iterable[RequestOutput]:
    outputs: dict[tuple[str, int], RequestOutput] = {}
    for output in chain.from_iterable(steps):
        if (earlier := outputs.setdefault((output.request_id, output.index), output)) is not output:
            _merge(earlier, output)
    return outputs.values()


def _merge(into: RequestOutput, new: RequestOutput) -> None:
    into.text += new.text
    into.token_ids += new.token_ids
    into.pieces += new.pieces
    if new.logprobs is not None:
        into.logprobs = (into.logprobs or []) + new.logprobs
    if new.prompt_logprobs is not None:
        into.prompt_logprobs = new.prompt_logprobs
    into.num_output_tokens = new.num_output_tokens
    into.num_cached_tokens = new.num_cached_tokens
    into.record = new.record
    into.finish_reason, into.stop_reason, into.error = new.finish_reason, new.stop_reason, new.error
