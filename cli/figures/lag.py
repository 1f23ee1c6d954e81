"""Whether the client itself keeps up: how late its event loop comes round to what is due."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple

#: How often the loop is looked at, in seconds.
_INTERVAL_S = 0.02

#: A threshold of the garbage collector that is not reached.
_NEVER = (1 << 31) - 1


class Lag(NamedTuple):
    """By how many seconds the loop was `late` for what was `due` (a time of its clock).

    In at least `machine` of them it had work, and no core to do it.
    """

    due: float
    late: float
    machine: float = 0.0


@asynccontextmanager
async def loop_lags(interval: float = _INTERVAL_S) -> AsyncIterator[list[Lag]]:
    """A list that fills, while the block runs, with how late the loop was for something due every `interval` seconds.

    What fell due while the loop was late is in it as well, or else the worst times would count least.
    A token that arrives while the loop is busy gets its time when the loop is free again, so a client that lags puts
    its own time into the target's figures.
    """
    lags: list[Lag] = []
    watch = asyncio.create_task(_watch(interval, lags))
    try:
        yield lags
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _watch(interval: float, lags: list[Lag]) -> None:
    now, computed = asyncio.get_running_loop().time, time.thread_time
    while True:
        due, before = now() + interval, computed()
        await asyncio.sleep(interval)
        # What made the loop late ended after the wait was over; all that this thread computed may belong to it.
        came, own = now(), computed() - before
        lags.append(_lag(due, came, own))
        while (due := due + interval) < came:
            lags.append(_lag(due, came, own))


def _lag(due: float, came: float, own: float) -> Lag:
    late = max(0.0, came - due)
    return Lag(due, late, max(0.0, late - own))


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the garbage collector from walking, in the middle of the block, through all that was there before it or that
    the block has made and kept.

    With the libraries that a model needs that takes some 80 ms, which would be a stall of every stream; with a million
    tokens on the records of the run it would take 200 ms. What is young is still collected.
    """
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()
