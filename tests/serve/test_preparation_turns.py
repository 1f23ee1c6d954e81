"""Turns of threads that parse and tokenise requests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from llmsched.cli.serve.preparation_turns import PreparationTurns


def test_the_thread_of_large_requests_rests_after_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the engine needs the GIL for each kernel, so parsing without a pause would hold it up."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one thread for large requests
    turns: list[tuple[float, float]] = []

    def parsing() -> Iterator[int]:
        begun = time.monotonic()
        time.sleep(0.02)
        turns.append((begun, time.monotonic()))
        yield len(turns)

    async def collect() -> None:
        threads = PreparationTurns()
        await asyncio.gather(*(threads.collect(parsing(), large=True) for _ in range(5)))

    asyncio.run(collect())
    for (begun, ended), (next_begun, _) in pairwise(turns):
        assert next_begun - ended >= ended - begun
