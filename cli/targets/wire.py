"""One connection as a load generator reads it: what comes is timed when it is received, not when its turn has come.

Where many streams have something at once, each waits only until the others are received, not until they are parsed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple, cast

#: Where all connections receive, one after the other. A buffer made anew for each read takes longer than the rest.
_BUFFER = memoryview(bytearray(1 << 16))

#: Bytes of the head of an answer beyond which it is none.
_LONGEST_HEAD = 1 << 16


class Received(NamedTuple):
    """Bytes, and the event loop's time when they were received."""

    content: bytes
    time: float


class Wire(asyncio.BufferedProtocol):
    """What one connection receives, in order. Nobody holds the sender back: answers are small, and late is wrong."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._transport: asyncio.Transport | None = None
        self._received: deque[Received] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._problem: Exception | None = None

    @property
    def fresh(self) -> bool:
        """Whether a request can be sent: the connection stands, and nothing came that nobody had asked for."""
        return not (self._ended or self._received)

    def write(self, content: bytes) -> None:
        assert self._transport is not None
        self._transport.write(content)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def read(self) -> Received:
        """What came next; no bytes at the end of the connection. Raises OSError if that broke."""
        while not self._received:
            if self._problem is not None:
                raise self._problem
            if self._ended:
                return Received(b"", self._now())
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._received.popleft()

    async def read_until(self, end: bytes) -> bytes:
        """What comes up to and with `end`. Raises ValueError if that is too long, EOFError if it does not come.

        The EOFError has what came instead.
        """
        content, time, at = b"", 0.0, -1
        while at < 0:
            more, time = await self.read()
            if not more:
                raise EOFError(content)
            content += more
            at = content.find(end)
            if max(at, len(content) if at < 0 else 0) > _LONGEST_HEAD:
                raise ValueError(f"the head of the answer is longer than {_LONGEST_HEAD} bytes")
        if rest := content[at + len(end) :]:
            self._received.appendleft(Received(rest, time))
        return content[: at + len(end)]

    # -- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._received.append(Received(bytes(_BUFFER[:nbytes]), self._now()))
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._problem = True, exc
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
