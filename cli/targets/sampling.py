"""The state of a target over time: who runs, who waits, how its KV memory is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from llmsched.cli.figures.kv_memory import TargetState

#: Samples that are kept; a longer run has them further apart.
MOST_SAMPLES = 4096


@asynccontextmanager
async def sampled(
    state: Callable[[], Awaitable[TargetState | None]], interval: float
) -> AsyncIterator[list[TargetState]]:
    """A list that fills with samples, one every `interval` seconds and the first after that time, while the block runs.

    Their times are those of the event loop's clock. A target that tells nothing is asked once.
    """
    samples: list[TargetState] = []
    watch = asyncio.create_task(_watch(state, interval, samples))
    try:
        yield samples
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _watch(
    state: Callable[[], Awaitable[TargetState | None]], interval: float, samples: list[TargetState]
) -> None:
    while True:
        await asyncio.sleep(interval)
        if (sample := await state()) is None:
            return
        samples.append(sample)
        if len(samples) > MOST_SAMPLES:
            del samples[1::2]
            interval *= 2
