from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

#: Time of one turn. A turn ends late if a single prompt takes longer.
_TURN_S = 0.01


class PreparationTurns:
    """Threads that parse and tokenise requests in turns: a request whose turn is over goes to the end of the queue."""

    def __init__(self) -> None:
        num_threads = max(1, min(3, (os.cpu_count() or 1) // 2 - 1))
        # Large requests have threads of their own, so that small ones never wait for them.
        self._small = ThreadPoolExecutor(num_threads + 1, thread_name_prefix="llmsched-prepare")
        self._large = ThreadPoolExecutor(num_threads, thread_name_prefix="llmsched-prepare-large")

    async def collect(self, work: Iterator[T], *, large: bool) -> list[T]:
        """Advance the iterator `work` in threads and return its items. If cancelled, stop after the present turn."""
        loop, threads = asyncio.get_running_loop(), self._large if large else self._small
        items: list[T] = []
        done = False
        while not done:
            part, done = await loop.run_in_executor(threads, _advance, work)
            items += part
        return items


def _advance(work: Iterator[T]) -> tuple[list[T], bool]:
    """Take items from `work` for one turn. Return them, and True if `work` has no more."""
    items, end = [], time.monotonic() + _TURN_S
    for item in work:
        items.append(item)
        if time.monotonic() >= end:
            return items, False
    return items, True
