"""The state of a target over time: who runs, who waits, how its KV memory is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from llmsched.engine.kv.pool import KVUsage

#: Samples that are kept; a longer run has them further apart.
MOST_SAMPLES = 4096


class Sample(NamedTuple):
    """What a target did at `time` (seconds after the start of the run). None is what it does not tell.

    The last three are shares of all KV memory: in blocks that requests hold, the part of that which is reserved and
    still empty, and what only the prefix cache keeps.
    """

    time: float
    running: int
    waiting: int
    kv_held: float | None = None
    kv_empty: float | None = None
    kv_cached: float | None = None


def sample_of(time: float, running: int, waiting: int, use: KVUsage) -> Sample:
    """A sample of an engine that tells how its KV memory is used."""
    total = max(1, use.total)
    return Sample(time, running, waiting, use.held / total, use.empty / total, use.cached / total)


@asynccontextmanager
async def sampled(state: Callable[[], Awaitable[Sample | None]], interval: float) -> AsyncIterator[list[Sample]]:
    """A list that fills with samples, one every `interval` seconds and the first after that time, while the block runs.

    Their times are those of the event loop's clock. A target that tells nothing is asked once.
    """
    samples: list[Sample] = []
    watch = asyncio.create_task(_watch(state, interval, samples))
    try:
        yield samples
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _watch(state: Callable[[], Awaitable[Sample | None]], interval: float, samples: list[Sample]) -> None:
    while True:
        await asyncio.sleep(interval)
        if (sample := await state()) is None:
            return
        samples.append(sample)
        if len(samples) > MOST_SAMPLES:
            del samples[1::2]
            interval *= 2
