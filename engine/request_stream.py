"""Streams that carry the outputs of requests to their readers on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from llmsched.engine.errors import LlmschedError
from llmsched.engine.request import RequestOutput

#: Most unread outputs of a request; beyond that, new outputs are merged into the last one of their choice.
MAX_PENDING_OUTPUTS = 256


class RequestStream(AsyncIterator[RequestOutput], AbstractAsyncContextManager["RequestStream"]):
    """Asynchronous iterator over the outputs of one request until all choices have ended.

    It raises EngineDeadError if the engine fails, and RequestError or QueueFullError if the engine refuses the request
    after `AsyncEngine.submit` returned. Leaving the stream's `async with` block early aborts the request. For use on
    the event loop only.
    """

    def __init__(self, request_id: str, num_choices: int, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._unfinished = num_choices
        self._abort = abort
        self._pending: deque[RequestOutput] = deque()
        self._error: LlmschedError | None = None
        self._ready = asyncio.Event()

    def deliver(self, output: RequestOutput) -> None:
        """Add an output without blocking.

        If MAX_PENDING_OUTPUTS outputs are unread, merge the new output into the last unread output of the same choice.
        """
        if output.finished:
            self._unfinished -= 1
        last = None
        if len(self._pending) >= MAX_PENDING_OUTPUTS:
            last = next((pending for pending in reversed(self._pending) if pending.index == output.index), None)
        if last is None:
            self._pending.append(output)
        else:
            _merge(last, output)
        self._ready.set()

    def fail(self, error: LlmschedError) -> None:
        """End the stream with an error, which the reader gets after the pending outputs."""
        self._error = error
        self._ready.set()

    @property
    def finished(self) -> bool:
        """True if all choices have ended or the stream has failed; outputs may still be unread."""
        return self._unfinished == 0 or self._error is not None

    def abort(self) -> None:
        """End the request unless it has ended."""
        if not self.finished:
            self._abort(self.request_id)

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._pending.popleft()

    async def __aexit__(self, *_: object) -> None:
        self.abort()


class OpenStreams(dict[str, RequestStream]):
    """Streams of the requests that have not ended, by request id. For use on the event loop only."""

    def __init__(self) -> None:
        super().__init__()
        #: Set while no stream is open.
        self.idle = asyncio.Event()
        self.idle.set()

    def add(self, stream: RequestStream) -> None:
        """Add a new stream."""
        self[stream.request_id] = stream
        self.idle.clear()

    def deliver(self, outputs: list[RequestOutput]) -> None:
        """Give each output to the stream of its request, if the stream is still open."""
        for output in outputs:
            if (stream := self.get(output.request_id)) is not None:
                stream.deliver(output)
                self._close_if_finished(stream)

    def fail(self, request_id: str, error: LlmschedError) -> None:
        """End the stream of a request with an error, if it is still open."""
        if (stream := self.get(request_id)) is not None:
            stream.fail(error)
            self._close_if_finished(stream)

    def _close_if_finished(self, stream: RequestStream) -> None:
        if stream.finished:
            del self[stream.request_id]
            if not self:
                self.idle.set()


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
    into.finish_reason, into.stop_reason, into.error = new.finish_reason, new.stop_reason, new.error
