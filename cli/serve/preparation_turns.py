from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: Time of one turn. A turn ends late if a single prompt takes longer.
_TURN_S = 0.01
#: Longest rest after a turn of a large request. It should be longer than a step of the engine.
_MAX_REST_S = 0.2


class PreparationTurns:
    """Threads that parse and tokenise requests in turns: a request whose turn is over goes to the end of the queue.

    After a turn of a large request, its thread rests for as long as the turn took, if `is_serving()` is True or small
    requests are being prepared. Parsing keeps the GIL, which the engine needs to launch each kernel. Without the rests,
    the engine would hardly advance.
    """

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        num_threads = max(1, min(3, (os.cpu_count() or 1) // 2 - 1))
        # Large requests have threads of their own, so that small ones never wait for them.
        self._small = ThreadPoolExecutor(num_threads + 1, thread_name_prefix="llmsched-prepare")
        self._large = ThreadPoolExecutor(num_threads, thread_name_prefix="llmsched-prepare-large")
        self._resting = threading.local()
        self._is_serving = is_serving
        self._num_small = 0

    async def collect(self, work: Iterator[T], *, large: bool) -> list[T]:
        """Advance the iterator `work` in threads and return its items. If cancelled, stop after the present turn."""
        loop = asyncio.get_running_loop()
        threads, advance = (self._large, self._rest_and_advance) if large else (self._small, _advance)
        items: list[T] = []
        done = False
        self._num_small += not large
        try:
            while not done:
                part, done = await loop.run_in_executor(threads, advance, work)
                items += part
            return items
        finally:
            self._num_small -= not large

    def _rest_and_advance(self, work: Iterator[T]) -> tuple[list[T], bool]:
        begun = time.monotonic()
        left = getattr(self._resting, "until", begun) - begun
        if left > 0 and (self._num_small or self._is_serving()):
            time.sleep(left)
            begun = time.monotonic()
        try:
            return _advance(work)
        finally:
            end = time.monotonic()
            self._resting.until = end + min(end - begun, _MAX_REST_S)


def _advance(work: Iterator[T]) -> tuple[list[T], bool]:
    """Take items from `work` for one turn. Return them, and True if `work` has no more."""
    items, end = [], time.monotonic() + _TURN_S
    for item in work:
        items.append(item)
        if time.monotonic() >= end:
            return items, False
    return items, True
