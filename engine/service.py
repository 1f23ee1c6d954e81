"""The engine in a thread of its own, and the streams that carry its outputs to the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from llmsched.engine.config import Limits, ResolvedConfig
from llmsched.engine.core import Engine, Timeline
from llmsched.engine.errors import EngineDeadError, LlmschedError, RequestError
from llmsched.engine.kv.pins import PinState
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.prompt_changes import PromptChange
from llmsched.engine.refusals import check_queue
from llmsched.engine.request import RequestOutput, SamplingParams
from llmsched.engine.stats import EngineStats

if TYPE_CHECKING:
    from llmsched.engine.memory.plan import MemoryPlan
    from llmsched.engine.text.tokenizer import Tokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Outputs that wait for a slow reader; beyond that, new ones are merged into the last of their choice.
MAX_PENDING_OUTPUTS = 256
IDLE_CHECK_SECONDS = 1.0
#: Pins may last for longer than a thread can be told to wait.
MAX_IDLE_SECONDS = 3600.0


class RequestStream:
    """The outputs of one request, in order; ends when each of its choices has. Used on the event loop only.

    Raises EngineDeadError when the engine fails, and the error of a request that the engine refused late. Leaving it
    unread to its end (`aclose`, `async with`) aborts the request.
    """

    def __init__(self, request_id: str, num_choices: int, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._unfinished = num_choices
        self._abort = abort
        self._pending: deque[RequestOutput] = deque()
        self._error: LlmschedError | None = None
        self._ready = asyncio.Event()

    def deliver(self, output: RequestOutput) -> None:
        """Take an output without ever blocking or dropping; a slow reader gets several at once."""
        if output.finished:
            self._unfinished -= 1
        if len(self._pending) >= MAX_PENDING_OUTPUTS and (last := self._last_pending(output.index)) is not None:
            _merge(last, output)
        else:
            self._pending.append(output)
        self._ready.set()

    def _last_pending(self, index: int) -> RequestOutput | None:
        return next((output for output in reversed(self._pending) if output.index == index), None)

    def fail(self, error: LlmschedError) -> None:
        """No more outputs will come."""
        self._error = error
        self._ready.set()

    @property
    def finished(self) -> bool:
        """Every choice has ended, or the stream has failed; outputs may still wait to be read."""
        return self._unfinished == 0 or self._error is not None

    def abort(self) -> None:
        """End the request at once, in whatever state it is."""
        if not self.finished:
            self._abort(self.request_id)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._pending.popleft()

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class AsyncEngine:
    """Runs an Engine in its own thread: the event loop never waits for a step, the engine never for a reader.

    `start` binds it to the running event loop; `submit` and the streams belong to that loop.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.draining = False
        self.error: str | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._stats = engine.stats()
        self._num_submitted = 0
        self._num_taken = 0
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="llmsched-engine", daemon=True)

    @property
    def config(self) -> ResolvedConfig:
        return self._engine.config

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def plan(self) -> MemoryPlan | None:
        return self._engine.plan

    @property
    def metrics(self) -> EngineMetrics:
        return self._engine.metrics

    @property
    def healthy(self) -> bool:
        return self.error is None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        """The state after the latest step; any thread may ask."""
        return self._stats

    def start(self) -> None:
        """Start the engine's thread. Call on the event loop that will use it."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Hand a request to the engine.

        Raises RequestError for what can never be served, QueueFullError when too many wait, EngineDeadError when the
        engine has failed or drains.
        """
        if self.error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.error}")
        if self.draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        if request_id in self._streams:
            raise RequestError("request_id", f"{request_id!r} is in use by a request that has not ended")
        self._engine.check(prompt_token_ids, sampling)
        waiting = self._stats.num_waiting + self._num_submitted - self._num_taken
        check_queue(waiting, sampling.n, self.config.max_queue_size, self._engine.retry_after)
        stream = RequestStream(request_id, sampling.n, self._request_abort)
        self._streams[request_id] = stream
        self._idle.clear()
        self._num_submitted += sampling.n
        arrival_time = self._engine.now()

        def add() -> None:
            self._num_taken += sampling.n
            try:
                self._engine.add_request(
                    request_id,
                    prompt_token_ids,
                    sampling,
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival_time=arrival_time,
                )
            except LlmschedError as error:
                self._on_loop(self._fail, request_id, error)

        self._inbox.put(add)
        return stream

    async def reconfigure(self, **limits: Unpack[Limits]) -> None:
        """See Engine.reconfigure."""
        await self._call(lambda: self._engine.reconfigure(**limits))

    async def reset_prefix_cache(self) -> None:
        """See Engine.reset_prefix_cache."""
        await self._call(self._engine.reset_prefix_cache)

    async def pin_prefix(self, token_ids: list[int], *, cache_salt: str = "", ttl: float | None = None) -> PinState:
        """See Engine.pin_prefix; `expires_at` is a time of time.monotonic()."""
        return await self._call(lambda: self._engine.pin_prefix(token_ids, cache_salt=cache_salt, ttl=ttl))

    async def unpin_prefix(self, pin_id: str) -> None:
        """See Engine.unpin_prefix."""
        await self._call(lambda: self._engine.unpin_prefix(pin_id))

    async def pinned_prefixes(self) -> list[PinState]:
        """See Engine.pinned_prefixes; `expires_at` is a time of time.monotonic()."""
        return await self._call(self._engine.pinned_prefixes)

    async def prompt_change(self) -> PromptChange | None:
        """See Engine.prompt_change."""
        return await self._call(self._engine.prompt_change)

    def watch_steps(self, on_step: Callable[[KVUsage], None]) -> None:
        """Let `on_step` be told, by the engine's thread, how KV memory is used in each step (see `Engine.on_step`)."""
        self._engine.on_step = on_step

    async def kv_use(self) -> KVUsage:
        """See Engine.kv_use."""
        return await self._call(self._engine.kv_use)

    async def explain(self, request_ids: Sequence[str]) -> list[list[Timeline]]:
        """Engine.explain of each."""
        return await self._call(lambda: [self._engine.explain(request_id) for request_id in request_ids])

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for those that are there; True if all ended in time."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End the thread after its present step. Requests that have not ended fail."""
        self.draining = True
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._fail_all("the server has shut down")

    # -- on the event loop ------------------------------------------------------------------------------------

    def _request_abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._post(self._engine.abort(request_id)))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.deliver(output)
            if stream.finished:
                self._forget(output.request_id)

    def _fail(self, request_id: str, error: LlmschedError) -> None:
        if (stream := self._streams.get(request_id)) is not None:
            stream.fail(error)
            self._forget(request_id)

    def _fail_all(self, reason: str) -> None:
        for request_id in list(self._streams):
            self._fail(request_id, EngineDeadError(reason))
        for call in self._calls:
            _fail_future(call, EngineDeadError(reason))

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()

    async def _call(self, action: Callable[[], T]) -> T:
        """Run `action` between two steps and wait for its result; its error is raised here."""
        if self._stopping or not self.healthy:
            raise EngineDeadError(f"the engine has stopped: {self.error or 'shut down'}")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = action()
            except LlmschedError as error:
                self._on_loop(_fail_future, done, error)
            else:
                self._stats = self._engine.stats()  # whoever waited for the result sees what it changed
                self._on_loop(_settle, done, result)

        self._calls.add(done)
        self._inbox.put(run)
        try:
            return await done
        finally:
            self._calls.discard(done)

    # -- in the engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_inbox()
                if self._engine.has_work() and not self._stopping:
                    self._post(self._engine.step())
        except Exception as error:
            logger.exception("the engine has failed")
            self.error = f"{type(error).__name__}: {error}"
            self._on_loop(self._fail_all, f"the engine has failed: {self.error}")

    def _take_inbox(self) -> None:
        """Run what the event loop asked for; without work, wait for it and meanwhile look after the books."""
        try:
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            self._stats = self._engine.stats()
        if self._stopping:
            return
        if self._engine.has_work():
            self._wait_for_more()
            return
        try:
            self._inbox.get(timeout=IDLE_CHECK_SECONDS)()
        except queue.Empty:
            self._engine.check_integrity()
            self._wait_idle()

    def _wait_idle(self) -> None:
        """Wait for the event loop, and let pins end meanwhile."""
        while True:
            until = self._engine.expire_pins()
            self._stats = self._engine.stats()
            wait = None if until is None else min(MAX_IDLE_SECONDS, max(0.0, until - self._engine.now()))
            try:
                action = self._inbox.get(timeout=wait)
            except queue.Empty:
                continue
            return action()

    def _wait_for_more(self) -> None:
        """While the scheduler coalesces arrivals, take the next one instead of stepping."""
        while not self._stopping and (until := self._engine.idle_until()) is not None:
            try:
                self._inbox.get(timeout=max(0.0, until - self._engine.now()))()
            except queue.Empty:
                return

    def _post(self, outputs: list[RequestOutput]) -> None:
        self._stats = self._engine.stats()
        if outputs:
            self._on_loop(self._deliver, outputs)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function` on the event loop; one that has closed has nobody left to tell."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("event loop closed before %s", function)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail_future(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _merge(into: RequestOutput, new: RequestOutput) -> None:
    """Append a later output of the same choice."""
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
