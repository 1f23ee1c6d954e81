"""What a connection receives: in order, with the time at which it was received, whenever it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from virtual_time import run_virtual

from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.targets.answer import read_answer
from llmsched.cli.targets.wire import Received, Wire


def received(wire: Wire, *parts: bytes) -> None:
    """What the event loop does when bytes have come."""
    for part in parts:
        wire.get_buffer(-1)[: len(part)] = part
        wire.buffer_updated(len(part))


def with_wire(test: Callable[[Wire], Awaitable[object]]) -> object:
    async def main() -> object:
        return await test(Wire())

    return run_virtual(main())


def test_bytes_have_the_time_at_which_they_came() -> None:
    async def test(wire: Wire) -> list[Received]:
        start = asyncio.get_running_loop().time()
        received(wire, b"ab")
        await asyncio.sleep(1.0)
        received(wire, b"cd")
        await asyncio.sleep(3.0)  # the client is busy
        return [part._replace(time=part.time - start) for part in (await wire.read(), await wire.read())]

    assert with_wire(test) == [(b"ab", 0.0), (b"cd", pytest.approx(1.0))]


def test_a_head_leaves_what_follows_it() -> None:
    async def test(wire: Wire) -> list[bytes]:
        received(wire, b"he", b"ad\r", b"\n\r\nbo", b"dy")
        return [await wire.read_until(b"\r\n\r\n"), (await wire.read()).content, (await wire.read()).content]

    assert with_wire(test) == [b"head\r\n\r\n", b"bo", b"dy"]


def test_a_reader_waits_for_what_comes_later() -> None:
    async def test(wire: Wire) -> list[Received]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        loop.call_later(2.0, received, wire, b"x")
        loop.call_later(3.0, wire.eof_received)
        return [part._replace(time=part.time - start) for part in (await wire.read(), await wire.read())]

    assert with_wire(test) == [(b"x", pytest.approx(2.0)), (b"", pytest.approx(3.0))]


def test_what_came_before_the_connection_broke_is_read_first() -> None:
    async def test(wire: Wire) -> bytes:
        received(wire, b"x")
        wire.connection_lost(ConnectionResetError("reset"))
        first = (await wire.read()).content
        with pytest.raises(ConnectionResetError, match="reset"):
            await wire.read()
        return first

    assert with_wire(test) == b"x"


def test_a_connection_with_something_unasked_for_is_not_fresh() -> None:
    async def test(wire: Wire) -> list[bool]:
        states = [wire.fresh]
        received(wire, b"HTTP/1.1 408 Request Timeout\r\n")
        states.append(wire.fresh)
        await wire.read()
        wire.eof_received()
        return [*states, wire.fresh]

    assert with_wire(test) == [True, False, False]


def test_tokens_have_the_time_that_the_transport_tells() -> None:
    """However late the client comes to parse them."""
    parts = [b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choices": [{"text": "b"}]}\n\ndata: [DONE]\n\n']
    times = iter([11.0, 12.0])
    last = 0.0

    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):  # type: ignore[no-untyped-def]
            nonlocal last
            for part in parts:
                last = next(times)
                await asyncio.sleep(5.0)
                yield part

    async def main() -> RequestRecord:
        record = RequestRecord(0, 10.0)
        response = httpx.Response(200, stream=Body(), extensions={"arrived": lambda: last})
        await read_answer(response, record, asyncio.get_running_loop().time)
        return record

    record = run_virtual(main())
    assert [chunk.time for chunk in record.chunks] == [11.0, 12.0]
    assert record.end == 12.0
