"""Turns of requests that are parsed and tokenised, so that one large request does not delay the others."""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

T = TypeVar("T")

#: Bodies up to this size are small: they are parsed at once, and one thread is kept for them.
SMALL_BYTES = 64 << 10
#: Time of one turn. A turn ends late if a single prompt takes longer.
_TURN_S = 0.01
#: Time that a byte of a body is expected to take; decides who goes first.
_SECONDS_PER_BYTE = 1e-6

_Waiting = list[tuple[float, int, "asyncio.Future[None]"]]


class PreparationTurns:
    """Threads that requests use in turns: of those that wait, the one that has had the least time is next.

    Requests with a large body never take the last thread. All methods belong to the event loop.
    """

    def __init__(self) -> None:
        self._num_threads = max(2, min(4, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="llmsched-prepare")
        self._running = {False: 0, True: 0}
        self._waiting: dict[bool, _Waiting] = {False: [], True: []}
        self._order = count()

    async def collect(self, work: Iterator[T], body_bytes: int) -> list[T]:
        """Return the items of `work`, which is advanced in threads. Cancelling ends the work after its current item."""
        loop, large = asyncio.get_running_loop(), body_bytes > SMALL_BYTES
        items: list[T] = []
        used = body_bytes * _SECONDS_PER_BYTE
        done = False
        while not done:
            await self._turn(used, large)
            begun = time.monotonic()
            turn = self._threads.submit(_advance, work)
            turn.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, large))
            part, done = await asyncio.wrap_future(turn)
            items += part
            used += time.monotonic() - begun
        return items

    async def _turn(self, used: float, large: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting[large], (used, next(self._order), turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(large)
            raise

    def _grant(self) -> None:
        """Give free threads to the requests that are next."""
        for queue in self._waiting.values():
            while queue and queue[0][2].done():  # the sender has left
                heapq.heappop(queue)
        small, big = self._waiting[False], self._waiting[True]
        if sum(self._running.values()) < self._num_threads and (small or big):
            may_be_large = bool(big) and self._running[True] < self._num_threads - 1
            if small and not (may_be_large and big[0] < small[0]):
                large = False
            elif may_be_large:
                large = True
            else:
                return
            self._running[large] += 1
            heapq.heappop(self._waiting[large])[2].set_result(None)
            self._grant()

    def _release(self, large: bool) -> None:
        self._running[large] -= 1
        self._grant()


def _advance(work: Iterator[T]) -> tuple[list[T], bool]:
    """Take items until a turn is over; return them, and whether they are the last."""
    items, end = [], time.monotonic() + _TURN_S
    for item in work:
        items.append(item)
        if time.monotonic() >= end:
            return items, False
    return items, True
