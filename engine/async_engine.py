"""Engine in a thread, for callers on an event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from llmsched.engine.core import Engine
from llmsched.engine.errors import EngineDeadError, InternalError, LlmschedError, RequestError
from llmsched.engine.recent_stats import RecentStats
from llmsched.engine.request import RequestOutput
from llmsched.engine.request_stream import OpenStreams, RequestStream
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.stats import EngineStats

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds without work after which the engine checks its integrity.
IDLE_CHECK_SECONDS = 1.0
#: Longest wait in seconds: pins may last longer than a thread can wait.
MAX_IDLE_SECONDS = 3600.0
#: Rows in succession without usable logits after which the model counts as broken.
MAX_BAD_ROWS = 8


class AsyncEngine:
    """Wrapper that runs an Engine, `core`, in a thread.

    `start()` binds the AsyncEngine to the running event loop. Use the streams, and all methods except `stats()`, on
    that loop only. Code on the loop may read `config`, `model`, `tokenizer`, `plan` and `metrics` of `core` directly.
    For anything else in `core`, it must use `call(...)`. An exception in a step ends the engine: all open streams and
    calls fail with EngineDeadError.
    """

    def __init__(self, core: Engine, *, step_timeout_s: float = 0.0) -> None:
        self.core = core
        self.step_timeout_s = step_timeout_s  # after which a step counts as hung; 0 is no limit
        self.draining = False
        self.error: str | None = None  # why the engine has ended
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams = OpenStreams()
        self._calls: set[asyncio.Future[Any]] = set()
        self._stats = core.stats()
        self.recent = RecentStats(self.stats, core.metrics)
        #: Requests that wait in the inbox. The lock keeps a request from counting there and in the scheduler at once.
        self._num_submitted = 0
        self._queue_lock = threading.Lock()
        self._stopping = False
        #: Time since when work has waited for a step to finish; None without work.
        self.due_since: float | None = None
        self._has_problem = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="llmsched-engine", daemon=True)

    @property
    def healthy(self) -> bool:
        return self.error is None and self._thread.is_alive()

    def diagnose(self) -> str | None:
        """Return why requests cannot be served, or None if they can. Log when a problem begins and when it ends."""
        problem = _problem_of(self)
        if problem and self.healthy and not self._has_problem:
            logger.error("%s", problem)
        elif self._has_problem and not problem:
            logger.info("the engine serves again")
        self._has_problem = problem is not None
        return problem

    @property
    def num_open(self) -> int:
        return len(self._streams)

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
        adapter: str | None = None,
        deadline: float = math.inf,
    ) -> RequestStream:
        """Hand a request to the engine and return the stream of its outputs.

        `adapter` is one of the engine's adapters (None: the model as it is). Raises RequestError for a request that can
        never be served, for an unknown adapter, or if `request_id` is in use, QueueFullError if too many requests wait,
        and EngineDeadError if the engine has failed or is draining.
        """
        if self.error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.error}")
        if self.draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        if request_id in self._streams:
            raise RequestError("request_id", f"{request_id!r} is in use by a request that has not ended")
        self.core.check(prompt_token_ids, sampling)
        self.core.adapter_index(adapter)
        with self._queue_lock:
            self.check_queue(sampling.n)
            self._num_submitted += sampling.n

        def abort(request_id: str) -> None:
            self._send(
                lambda: self._post(self.core.abort(request_id)), lambda error: self._streams.fail(request_id, error)
            )

        stream = RequestStream(request_id, sampling.n, abort)
        self._streams.add(stream)
        arrival_time = self.core.clock()

        def add() -> None:
            with self._queue_lock:
                self._num_submitted -= sampling.n
                self.core.add_request(
                    request_id,
                    prompt_token_ids,
                    sampling,
                    priority=priority,
                    cache_salt=cache_salt,
                    adapter=adapter,
                    arrival_time=arrival_time,
                    deadline=deadline,
                    limit_queue=False,
                )

        self._send(add, lambda error: self._streams.fail(request_id, error))
        return stream

    def check_queue(self, num_new: int = 1) -> None:
        """Raise QueueFullError if, with `num_new` more requests, more than max_queue_size would wait."""
        self.core.check_queue(len(self.core.scheduler.waiting) + self._num_submitted, num_new)

    async def call(self, action: Callable[[Engine], T]) -> T:
        """Run `action` in the engine's thread between two steps and return its result.

        If `action` raises an LlmschedError, the same error is raised here; any other exception is logged and becomes an
        InternalError. Raises EngineDeadError if the engine has stopped or stops before it runs `action`.
        """
        if self._stopping or not self.healthy:
            raise EngineDeadError(f"the engine has stopped: {self.error or 'shut down'}")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            result = action(self.core)
            self._stats = self.core.stats()  # the caller must see what the action changed
            self._on_loop(_settle, done, result)

        self._calls.add(done)
        self._send(run, lambda error: _fail_future(done, error))
        try:
            return await done
        finally:
            self._calls.discard(done)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the open ones. Return True if all end within `timeout_s` seconds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._streams.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread after its current step. Open requests end with EngineDeadError.

        Returns True if the thread ended within `timeout_s` seconds (None: no limit).
        """
        self.draining = True
        self._stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout_s)
        ended = not self._thread.is_alive()
        problem = _problem_of(self) if self.error or not ended else None
        self._fail_all(problem or "the server has shut down")
        return ended

    def _send(self, action: Callable[[], None], fail: Callable[[LlmschedError], None]) -> None:
        """Run `action` in the engine's thread. If `action` fails, call `fail` with the error on the event loop."""
        self._inbox.put(lambda: self._attempt(action, fail))

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
                    self.due_since = self.due_since or time.monotonic()
                    outputs = self.core.step()
                    self.due_since = time.monotonic()
                    self._post(outputs)
        except BaseException as error:  # SystemExit too ends the engine, and its clients must learn why
            self.error = f"{type(error).__name__}: {error}"
            self._on_loop(self._fail_all, f"the engine has failed: {self.error}")
            logger.exception("the engine has failed")

    def _attempt(self, action: Callable[[], None], fail: Callable[[LlmschedError], None]) -> None:
        """Run `action`. If it raises an LlmschedError, call `fail` with the error on the event loop.

        Any other exception is logged, and `fail` gets an InternalError. Raises RuntimeError, which ends the engine, if
        such an exception has left the engine's blocks or requests inconsistent.
        """
        try:
            action()
        except LlmschedError as error:
            self._on_loop(fail, error)
        except Exception as error:
            logger.exception("a call to the engine has failed")
            self._on_loop(fail, InternalError("internal error; the server's log has the details"))
            try:
                self.core.check_integrity()
            except Exception as broken:
                raise RuntimeError(
                    f"{type(error).__name__} in a call left the engine inconsistent: {broken}"
                ) from error

    def _take_inbox(self) -> None:
        while self._run_next(0.0):
            pass
        self.core.observe(self._refresh)
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
                self.core.observe(self._refresh)
                wait = None if until is None else min(MAX_IDLE_SECONDS, until - self.core.clock())

    def _run_next(self, timeout: float | None) -> bool:
        if timeout != 0.0:
            self.due_since = None  # the engine waits because there is nothing to do
        try:
            action = self._inbox.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return False
        self.due_since = self.due_since or time.monotonic()
        action()
        return True

    def _refresh(self) -> None:
        self._stats = self.core.stats()

    def _post(self, outputs: list[RequestOutput]) -> None:
        self.core.observe(self._refresh)
        if outputs and self._streams.post(outputs):
            self._on_loop(self._streams.deliver)

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("event loop closed before %s", function)


def _problem_of(engine: AsyncEngine) -> str | None:
    if not engine.healthy:
        return f"the engine has failed: {engine.error}" if engine.error else "the engine's thread does not run"
    since, limit = engine.due_since, engine.step_timeout_s
    if limit and since is not None and (waited := time.monotonic() - since) > limit:
        return f"the engine hangs: no step has finished for {waited:.0f} s (step_timeout {limit:g} s)"
    if (count := engine.core.num_bad_rows) >= MAX_BAD_ROWS:
        return f"the model is broken: it computed no usable logits for the last {count} rows (NaN or all -inf)"
    return None


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail_future(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
