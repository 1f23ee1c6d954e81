"""Engine in a thread, for callers on an event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from llmsched.engine.core import Engine
from llmsched.engine.errors import EngineDeadError, LlmschedError, RequestError
from llmsched.engine.request import RequestOutput, SamplingParams
from llmsched.engine.request_stream import OpenStreams, RequestStream
from llmsched.engine.stats import EngineStats

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds without work after which the engine checks its integrity.
IDLE_CHECK_SECONDS = 1.0
#: Longest wait in seconds: pins may last longer than a thread can wait.
MAX_IDLE_SECONDS = 3600.0


class AsyncEngine:
    """Wrapper that runs an Engine, `core`, in a thread.

    The event loop never waits for a step, and the engine never waits for a reader. Other threads read only the
    `config`, `model`, `tokenizer`, `plan` and `metrics` of `core`; for everything else they use `call`. `start` binds
    the engine to the running event loop. Only that loop may use the streams and all methods except `stats`.
    """

    def __init__(self, core: Engine) -> None:
        self.core = core
        self.draining = False
        self.error: str | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams = OpenStreams()
        self._calls: set[asyncio.Future[Any]] = set()
        self._stats = core.stats()
        self._num_submitted = 0
        self._num_taken = 0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="llmsched-engine", daemon=True)

    @property
    def healthy(self) -> bool:
        """True while the engine's thread runs and has not failed."""
        return self.error is None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Return the state after the latest step. Any thread may call this."""
        return self._stats

    def start(self) -> None:
        """Start the engine's thread. Call this on the event loop that will use the engine."""
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
        """Hand a request to the engine and return the stream of its outputs.

        Raises RequestError for a request that can never be served, QueueFullError if too many requests wait, and
        EngineDeadError if the engine has failed or is draining.
        """
        if self.error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.error}")
        if self.draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        if request_id in self._streams:
            raise RequestError("request_id", f"{request_id!r} is in use by a request that has not ended")
        self.core.check(prompt_token_ids, sampling)
        self.core.check_queue(self._stats.num_waiting + self._num_submitted - self._num_taken, sampling.n)
        stream = RequestStream(request_id, sampling.n, self._request_abort)
        self._streams.add(stream)
        self._num_submitted += sampling.n
        arrival_time = self.core.clock()

        def add() -> None:
            self._num_taken += sampling.n
            try:
                self.core.add_request(
                    request_id,
                    prompt_token_ids,
                    sampling,
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival_time=arrival_time,
                )
            except LlmschedError as error:
                self._on_loop(self._streams.fail, request_id, error)

        self._inbox.put(add)
        return stream

    async def call(self, action: Callable[[Engine], T]) -> T:
        """Run `action` in the engine's thread between two steps and return its result.

        Raises the LlmschedError that `action` raises; any other exception in `action` stops the engine. Raises
        EngineDeadError if the engine has stopped, or stops before it runs the action.
        """
        if self._stopping or not self.healthy:
            raise EngineDeadError(f"the engine has stopped: {self.error or 'shut down'}")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = action(self.core)
            except LlmschedError as error:
                self._on_loop(_fail_future, done, error)
            else:
                self._stats = self.core.stats()  # the caller must see what the action changed
                self._on_loop(_settle, done, result)

        self._calls.add(done)
        self._inbox.put(run)
        try:
            return await done
        finally:
            self._calls.discard(done)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones; return whether all ended within `timeout_s` seconds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._streams.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End the thread after its current step. Open requests end with EngineDeadError."""
        self.draining = True
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._fail_all("the server has shut down")

    def _request_abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._post(self.core.abort(request_id)))

    def _fail_all(self, reason: str) -> None:
        for request_id in list(self._streams):
            self._streams.fail(request_id, EngineDeadError(reason))
        for call in self._calls:
            _fail_future(call, EngineDeadError(reason))

    # -- in the engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_inbox()
                if self.core.has_work() and not self._stopping:
                    self._post(self.core.step())
        except Exception as error:
            logger.exception("the engine has failed")
            self.error = f"{type(error).__name__}: {error}"
            self._on_loop(self._fail_all, f"the engine has failed: {self.error}")

    def _take_inbox(self) -> None:
        """Run the actions that the event loop has sent.

        If the engine has no work, check its integrity once and wait for the next action.
        """
        while self._run_next(0.0):
            pass
        self._stats = self.core.stats()
        if self._stopping:
            return
        if self.core.has_work():
            # While the scheduler waits for more requests to batch, run the next action instead of a step.
            while not self._stopping and (until := self.core.idle_until()) is not None:
                if not self._run_next(until - self.core.clock()):
                    return
        elif not self._run_next(IDLE_CHECK_SECONDS):
            self.core.check_integrity()
            wait: float | None = 0.0
            while not self._run_next(wait):
                until = self.core.prefixes.expire()
                self._stats = self.core.stats()
                wait = None if until is None else min(MAX_IDLE_SECONDS, until - self.core.clock())

    def _run_next(self, timeout: float | None) -> bool:
        """Run the next action and return True; return False if none arrives within `timeout` seconds (None: wait)."""
        try:
            action = self._inbox.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return False
        action()
        return True

    def _post(self, outputs: list[RequestOutput]) -> None:
        self._stats = self.core.stats()
        if outputs:
            self._on_loop(self._streams.deliver, outputs)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        """Run `function` on the event loop; do nothing if the loop has closed."""
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
