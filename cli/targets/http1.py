"""HTTP/1.1 as a load generator needs it: one connection, little work per chunk.

httpx's own transport spends more time on a chunk than the parsing of its JSON takes, and as much on beginning a request
as a server needs for a token; at some hundred streams the client would be what is measured. (RFC 9112.)
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import httpx

from llmsched.cli.targets.wire import Wire

#: Bytes of a line with the size of a chunk, or of trailers, beyond which an answer is none.
_LONGEST_LINE = 1 << 14

_NO_ANSWER = "the connection was closed without an answer"


class ChunkDecoder:
    """Takes the bytes of a chunked body as they come, split anywhere, and gives its content (RFC 9112, section 7.1).

    What follows the body, once it is `done`, is left in `rest`.
    """

    def __init__(self) -> None:
        self.done = False
        self.rest = b""
        self._left = 0
        self._trailers = False

    def feed(self, received: bytes) -> bytes:
        """The content that these bytes complete. Raises ValueError for what is no chunked body."""
        data, content, at = self.rest + received, [], 0
        while not self.done and at < len(data):
            if self._left > 2:
                part = data[at : at + self._left - 2]
                content.append(part)
                self._left -= len(part)
                at += len(part)
            elif self._left:
                # The line end after a chunk; its bytes may come one by one.
                if data[at : at + 1] != b"\r\n"[2 - self._left : 3 - self._left]:
                    raise ValueError("a chunk is longer than its size says")
                self._left -= 1
                at += 1
            elif (end := data.find(b"\r\n", at)) < 0:
                break
            else:
                self._line(data[at:end])
                at = end + 2
        self.rest = data[at:]
        if len(self.rest) > _LONGEST_LINE:
            raise ValueError("a line between chunks does not end")
        return b"".join(content)

    def _line(self, line: bytes) -> None:
        """The size of the next chunk, or what follows the last one."""
        if self._trailers:
            self.done = not line
            return
        size = line.partition(b";")[0].strip()
        if not size or size.strip(b"0123456789abcdefABCDEF"):
            raise ValueError(f"{line[:40]!r} is no size of a chunk")
        if int(size, 16):
            self._left = int(size, 16) + 2
        else:
            self._trailers = True


class _NoAnswerError(httpx.RemoteProtocolError):
    """The connection ended before the first byte of an answer."""


class Http1Transport(httpx.AsyncBaseTransport):
    """One connection, for one request at a time; opened when needed, kept open while the server does.

    Tells the request's `trace` extension when a connection is begun and stands, and when the request is sent. The
    response's extension `arrived` tells when (the event loop's time) the bytes that were read last had been received.
    """

    def __init__(self, verify: ssl.SSLContext) -> None:
        self._ssl = verify
        self._wire: Wire | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the head of its answer. Raises httpx's errors."""
        if self._wire is not None and not self._wire.fresh:
            self.drop()
        used_before = self._wire is not None
        try:
            return await self._exchange(request)
        except _NoAnswerError:
            # A server may close a connection just when it is used again.
            if not used_before:
                raise
            return await self._exchange(request)

    async def aclose(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Close the connection, whatever still comes on it."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        try:
            wire = await self._connected(request)
            await request.extensions["trace"]("http11.send_request_headers.started", {})
            wire.write(_head_of(request) + request.content)
            status, headers = await _read_head(wire)
            body = _Body(self, wire, status, httpx.Headers(headers))
            return httpx.Response(status, headers=headers, stream=body, extensions={"arrived": lambda: body.arrived})
        except (OSError, EOFError) as problem:
            self.drop()
            begun = isinstance(problem, EOFError) and problem.args[0]
            reason = "the connection was closed within the head of the answer" if begun else _NO_ANSWER
            reason = _reason(problem) if isinstance(problem, OSError) else reason
            raise (httpx.RemoteProtocolError if begun else _NoAnswerError)(reason) from problem
        except ValueError as problem:
            self.drop()
            raise httpx.RemoteProtocolError(_reason(problem)) from problem
        except BaseException:
            self.drop()
            raise

    async def _connected(self, request: httpx.Request) -> Wire:
        if self._wire is None:
            trace, url = request.extensions["trace"], request.url
            secure = url.scheme == "https"
            await trace("connection.connect_tcp.started", {})
            try:
                _, self._wire = await asyncio.get_running_loop().create_connection(
                    Wire, url.host, url.port or (443 if secure else 80), ssl=self._ssl if secure else None
                )
            except OSError as problem:
                raise httpx.ConnectError(_reason(problem)) from problem
            await trace("connection.connect_tcp.complete", {})
        return self._wire


class _Body(httpx.AsyncByteStream):
    """The body of an answer; when it is not read to its end, or the server says so, its connection is closed.

    `arrived` is when what was given last had been received.
    """

    def __init__(self, transport: Http1Transport, wire: Wire, status: int, headers: httpx.Headers) -> None:
        self.arrived = 0.0
        self._transport = transport
        self._wire = wire
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        self._left = _length(length) if length is not None and not self._chunked else None
        self._complete = status in (204, 304) or self._left == 0
        self._keep = "close" not in headers.get("connection", "").lower()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        decoder = ChunkDecoder() if self._chunked else None
        try:
            while not self._complete:
                received, self.arrived = await self._wire.read()
                if not received:
                    self._end_of_connection()
                    return
                if decoder is not None:
                    received = decoder.feed(received)
                    self._complete = decoder.done
                    self._keep = self._keep and not (decoder.done and decoder.rest)
                elif self._left is not None:
                    self._keep = self._keep and len(received) <= self._left
                    received = received[: self._left]
                    self._left -= len(received)
                    self._complete = not self._left
                if received:
                    yield received
        except (OSError, ValueError) as problem:
            raise httpx.RemoteProtocolError(_reason(problem)) from problem

    def _end_of_connection(self) -> None:
        """The end of a body that has no other; of any other it comes too early."""
        self._keep = False
        if self._chunked or self._left is not None:
            raise httpx.RemoteProtocolError("the connection was closed before the answer was over")

    async def aclose(self) -> None:
        if not (self._complete and self._keep):
            self._transport.drop()


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text[:40]!r} is no Content-Length")
    return int(text)


def _head_of(request: httpx.Request) -> bytes:
    lines = [f"{request.method} ".encode() + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join([*lines, b"", b""])


async def _read_head(wire: Wire) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Status and headers of the answer, after any interim ones (100 and the like)."""
    while True:
        first, *lines = (await wire.read_until(b"\r\n\r\n")).split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise ValueError(f"{first[:60]!r} is no answer in HTTP/1.1")
        if int(rest[:3]) >= 200:
            pairs = (line.partition(b":") for line in lines if line)
            return int(rest[:3]), [(name.strip(), value.strip()) for name, _, value in pairs]


def _reason(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
