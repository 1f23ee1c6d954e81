from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: Time of one turn. A turn ends late if a single prompt takes longer.
_TURN_S = 0.01


class PreparationTurns:
    """Threads that parse and tokenise requests in turns: a request whose turn is over goes to the end of the queue.

    After a turn of a large request, its thread rests for as long as the turn took. Parsing keeps the GIL, which the
    engine needs to launch each kernel. Without the rests, the engine would hardly advance.
    """

    def __init__(self) -> None:
        num_threads = max(1, min(3, (os.cpu_count() or 1) // 2 - 1))
        # Large requests have threads of their own, so that small ones never wait for them.
        self._small = ThreadPoolExecutor(num_threads + 1, thread_name_prefix="llmsched-prepare")
        self._large = ThreadPoolExecutor(num_threads, thread_name_prefix="llmsched-prepare-large")
        self._resting = threading.local()

    async def collect(self, work: Iterator[T], *, large: bool) -> list[T]:
        """Advance the iterator `work` in threads and return its items. If cancelled, stop after the present turn."""
        loop = asyncio.get_running_loop()
        threads, advance = (self._large, self._rest_and_advance) if large else (self._small, _advance)
        items: list[T] = []
        done = False
        while not done:
            part, done = await loop.run_in_executor(threads, advance, work)
            items += part
        return items

    def _rest_and_advance(self, work: Iterator[T]) -> tuple[list[T], bool]:
        begun = time.monotonic()
        if (left := getattr(self._resting, "until", begun) - begun) > 0:
            time.sleep(left)
            begun = time.monotonic()
        try:
            return _advance(work)
        finally:
            end = time.monotonic()
            self._resting.until = end + (end - begun)


def _advance(work: Iterator[T]) -> tuple[list[T], bool]:
    """Take items from `work` for one turn. Return them, and True if `work` has no more."""
    items, end = [], time.monotonic() + _TURN_S
    for item in work:
        items.append(item)
        if time.monotonic() >= end:
            return items, False
    return items, True
