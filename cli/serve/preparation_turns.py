from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import TypeVar

from llmsched.engine.grammar.compiler import MAX_COMPILATIONS

T = TypeVar("T")

#: Bodies of requests up to this size are parsed at once; larger ones take turns.
SMALL_BYTES = 64 << 10
#: Time of one turn. A turn ends late if a single prompt takes longer.
_TURN_S = 0.01
#: Longest rest after a turn of a large request. It should be longer than a step of the engine.
_MAX_REST_S = 0.2


class Work(Enum):
    """Kind of a request's preparation."""

    SMALL = auto()
    LARGE = auto()
    COMPILING = auto()  # may compile a grammar, which can take seconds


class PreparationTurns:
    """Threads that parse and tokenise requests in turns: a request whose turn is over goes to the end of the queue.

    Each kind of work has threads of its own, so that no kind waits for another one.

    After a turn that is not of a small request, its thread rests for as long as the turn took, if `is_serving()` is
    True or small requests are being prepared. Parsing keeps the GIL, which the engine needs to launch each kernel.
    Without the rests, the engine would hardly advance.
    """

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        num_threads = max(1, min(3, (os.cpu_count() or 1) // 2 - 1))
        counts = {Work.SMALL: num_threads + 1, Work.LARGE: num_threads, Work.COMPILING: MAX_COMPILATIONS}
        self._threads = {
            work: ThreadPoolExecutor(count, thread_name_prefix=f"llmsched-prepare-{work.name.lower()}")
            for work, count in counts.items()
        }
        self._resting = threading.local()
        self._is_serving = is_serving
        self._num_small = 0

    async def collect(self, steps: Iterator[T], work: Work) -> list[T]:
        """Advance the iterator `steps` in threads and return its items. If cancelled, stop after the present turn."""
        loop = asyncio.get_running_loop()
        is_small = work is Work.SMALL
        advance = _advance if is_small else self._rest_and_advance
        items: list[T] = []
        done = False
        self._num_small += is_small
        try:
            while not done:
                part, done = await loop.run_in_executor(self._threads[work], advance, steps)
                items += part
            return items
        finally:
            self._num_small -= is_small

    def _rest_and_advance(self, steps: Iterator[T]) -> tuple[list[T], bool]:
        begun = time.monotonic()
        left = getattr(self._resting, "until", begun) - begun
        if left > 0 and (self._num_small or self._is_serving()):
            time.sleep(left)
            begun = time.monotonic()
        try:
            return _advance(steps)
        finally:
            end = time.monotonic()
            self._resting.until = end + min(end - begun, _MAX_REST_S)


def _advance(steps: Iterator[T]) -> tuple[list[T], bool]:
    """Take items from `steps` for one turn. Return them, and True if `steps` has no more."""
    items, end = [], time.monotonic() + _TURN_S
    for item in steps:
        items.append(item)
        if time.monotonic() >= end:
            return items, False
    return items, True
