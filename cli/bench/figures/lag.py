"""Whether the client itself keeps up: how late its event loop comes round to what is due."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

#: How often the loop is looked at, in seconds.
_INTERVAL_S = 0.02


@asynccontextmanager
async def loop_lags() -> AsyncIterator[list[float]]:
    """A list that fills, while the block runs, with the seconds by which a wait of a known length ended too late.

    A token that arrives while the loop is busy gets its time when the loop is free again, so a client that lags puts
    its own time into the target's figures.
    """
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))
    try:
        yield lags
    finally:
        watch.cancel()


async def _watch(lags: list[float]) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due = now() + _INTERVAL_S
        await asyncio.sleep(_INTERVAL_S)
        lags.append(max(0.0, now() - due))


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the garbage collector from walking, in the middle of the block, through all that was there before it.

    With the libraries that a model needs that takes some 80 ms, which would be a stall of every stream. `serve` does
    the same.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
