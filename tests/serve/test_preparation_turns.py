"""Turns of threads that parse and tokenise requests."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from llmsched.cli.serve import preparation_turns
from llmsched.cli.serve.preparation_turns import _MAX_REST_S, PreparationTurns, Work


@pytest.mark.parametrize(
    ("seconds", "others", "rests"),
    [(0.02, "served", [0.02] * 2), (5.0, "served", [_MAX_REST_S] * 2), (0.02, "prepared", [0.02] * 2), (0.02, "", [])],
)
def test_the_thread_of_large_requests_rests_after_each_turn_beside_others(
    seconds: float, others: str, rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the engine needs the GIL for each kernel, so parsing without a pause would hold it up."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # one thread for large requests
    now, slept = 0.0, []

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        pass_time(seconds)

    monkeypatch.setattr(preparation_turns, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))

    def parsing() -> Iterator[int]:
        pass_time(seconds)
        yield 1

    large_ones_are_parsed = threading.Event()

    def preparing() -> Iterator[int]:
        large_ones_are_parsed.wait()
        yield 1

    async def collect() -> None:
        threads = PreparationTurns(lambda: others == "served")
        if others == "prepared":
            small = asyncio.create_task(threads.collect(preparing(), Work.SMALL))
            await asyncio.sleep(0)
        await asyncio.gather(*(threads.collect(parsing(), Work.LARGE) for _ in range(2)))
        large_ones_are_parsed.set()
        if others == "prepared":
            assert await small == [1]

    asyncio.run(collect())
    assert slept == pytest.approx(rests)


@pytest.mark.parametrize("busy", Work)
def test_no_kind_of_work_waits_for_another(busy: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    gate = threading.Event()

    def stuck() -> Iterator[int]:
        assert gate.wait(60)
        yield 1

    async def collect() -> None:
        threads = PreparationTurns(lambda: False)
        late = [asyncio.create_task(threads.collect(stuck(), busy)) for _ in range(9)]
        await asyncio.sleep(0)
        for work in {*Work} - {busy}:
            assert await asyncio.wait_for(threads.collect(iter([1, 2]), work), 30) == [1, 2]
        assert not any(task.done() for task in late)
        gate.set()
        assert await asyncio.gather(*late) == [[1]] * 9

    asyncio.run(collect())
