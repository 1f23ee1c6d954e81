"""HTTP/1.1 client for a load generator, with the exact time of each socket read.

httpx's own transport needs so much time per chunk that, with a few hundred streams, the benchmark would measure the
client instead of the server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import httptools
import httpx

from llmsched.engine.proxies import proxy_for

#: Receive buffer of all connections: allocating one per read would take longer than the rest of the read.
_BUFFER = memoryview(bytearray(1 << 16))

#: Most bytes in a row that are no content (head, chunk sizes, trailers). An answer with more is rejected.
_MAX_OVERHEAD = 1 << 16


class Received(NamedTuple):
    """Bytes, and when they were received, in seconds of the event loop's clock."""

    content: bytes
    time: float


class Connection(asyncio.BufferedProtocol):
    """Connection that queues the bytes that it receives, with the time of the socket read.

    There is no flow control, because a paused sender would falsify the times.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._received: asyncio.Queue[Received | Exception] = asyncio.Queue()

    @property
    def idle(self) -> bool:
        """True if a request can be sent: the connection is open, and no unexpected bytes have arrived."""
        return self._received.empty()

    async def read(self) -> Received:
        """Return the next bytes, or b"" at the end of the connection. Raises OSError if the connection broke."""
        received = await self._received.get()
        if isinstance(received, Exception):
            raise received
        return received

    # -- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._received.put_nowait(Received(bytes(_BUFFER[:nbytes]), self._now()))

    def eof_received(self) -> None:
        self._received.put_nowait(Received(b"", self._now()))

    def connection_lost(self, exc: Exception | None) -> None:
        self._received.put_nowait(exc or Received(b"", self._now()))


class ResponseParser:
    """Incremental parser of one response. It skips interim responses (1xx).

    `has_head` is True once `status` and `headers` are set, and `complete` once the body has ended. `reusable` is True
    if the connection can carry another request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.complete = False
        self.reusable = False
        self._content: list[bytes] = []
        self._overhead = 0
        self._parser = httptools.HttpResponseParser(self)
        # A response with a Content-Length and chunks is chunked (RFC 9112, section 6.3).
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)

    def feed(self, received: bytes) -> bytes:
        """Return the part of the body that `received` contains. Raises ValueError if the response is malformed."""
        self._content.clear()
        try:
            self._parser.feed_data(received)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as problem:
            self.reusable = False
            if not self.complete:
                what = "malformed body" if self.has_head else f"{received[:60]!r} is not an HTTP/1.1 answer"
                raise ValueError(f"{what}: {problem}") from problem
        if self._content:
            self._overhead = 0
            return b"".join(self._content)
        self._overhead += len(received)
        if self._overhead > _MAX_OVERHEAD:
            part = "a chunk size or trailer" if self.has_head else "the head"
            raise ValueError(f"{part} of the answer is longer than {_MAX_OVERHEAD} bytes")
        return b""

    def check_end(self) -> None:
        """Raise ValueError if the connection was closed before the whole body had arrived."""
        headers = httpx.Headers(self.headers)
        if "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower():
            raise ValueError("the connection was closed before the answer was over")

    # -- called by httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.reusable = False  # a second response has begun, which was not requested

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # later headers are trailers
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if not self.has_head:
            self.status = self._parser.get_status_code()
            self.has_head = self.status >= 200
            if not self.has_head:
                self.headers.clear()

    def on_body(self, content: bytes) -> None:
        if not self.complete:
            self._content.append(content)

    def on_message_complete(self) -> None:
        if self.has_head and not self.complete:
            self.complete, self.reusable = True, self._parser.should_keep_alive()


class Http1Transport(httpx.AsyncBaseTransport):
    """Transport that keeps one connection and sends one request at a time.

    The response's extension `arrived` is a function that returns the time at which the last piece of content was
    received, in seconds of the event loop's clock.
    """

    def __init__(self, verify: ssl.SSLContext) -> None:
        self._ssl = verify
        self._connection: Connection | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read its answer's head. Raises ConnectError, ReadError or RemoteProtocolError of httpx."""
        if self._connection is not None and not self._connection.idle:
            self.drop()
        used_before = self._connection is not None
        try:
            return await self._exchange(request)
        except httpx.ReadError:
            # A server may close a connection at the moment it is used again.
            if not used_before:
                raise
            return await self._exchange(request)

    async def aclose(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Close the connection, even in the middle of an answer."""
        if self._connection is not None:
            self._connection.transport.close()
            self._connection = None

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        try:
            trace, url = request.extensions["trace"], request.url
            if (connection := self._connection) is None:
                secure = url.scheme == "https"
                await trace("connection.connect_tcp.started", {})
                try:
                    _, connection = await asyncio.get_running_loop().create_connection(
                        Connection, url.host, url.port or (443 if secure else 80), ssl=self._ssl if secure else None
                    )
                except OSError as problem:
                    raise httpx.ConnectError(_reason(problem)) from problem
                self._connection = connection
                await trace("connection.connect_tcp.complete", {})
            await trace("http11.send_request_headers.started", {})
            head = [f"{request.method} ".encode() + url.raw_path + b" HTTP/1.1"]
            head += [name + b": " + value for name, value in request.headers.raw]
            connection.transport.write(b"\r\n".join([*head, b"", b""]) + request.content)
            parser = ResponseParser()
            body = _Body(self, connection, parser, *await _read_head(connection, parser))
            extensions = {"arrived": lambda: body.arrived}
            return httpx.Response(parser.status, headers=parser.headers, stream=body, extensions=extensions)
        except OSError as problem:
            self.drop()
            raise httpx.ReadError(_reason(problem)) from problem
        except ValueError as problem:
            self.drop()
            raise httpx.RemoteProtocolError(_reason(problem)) from problem
        except BaseException:
            self.drop()
            raise


@dataclass(slots=True)
class _Body(httpx.AsyncByteStream):
    transport: Http1Transport
    connection: Connection
    parser: ResponseParser
    first: bytes  # content that was received together with the head
    arrived: float  # time at which the last content was received, in seconds of the event loop's clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.first:
            yield self.first
        try:
            while not self.parser.complete:
                received, self.arrived = await self.connection.read()
                if not received:
                    self.parser.check_end()
                    return
                if content := self.parser.feed(received):
                    yield content
        except (OSError, ValueError) as problem:
            raise httpx.RemoteProtocolError(_reason(problem)) from problem

    async def aclose(self) -> None:
        if not self.parser.reusable:
            self.transport.drop()


async def _read_head(connection: Connection, parser: ResponseParser) -> Received:
    """Read up to the end of the head, and return the content that was received together with the head.

    Raises httpx.ReadError if the connection is closed before any byte, and ValueError if it is closed within the head.
    """
    begun = False
    while True:
        received, time = await connection.read()
        if not received and not begun:
            raise httpx.ReadError("the connection was closed without an answer")
        if not received:
            raise ValueError("the connection was closed within the head of the answer")
        begun, content = True, parser.feed(received)
        if parser.has_head:
            return Received(content, time)


def _reason(problem: Exception) -> str:
    return str(problem) or type(problem).__name__


class TransportPool:
    """Pool of transports to one server. It lends the transport that was given back last.

    If `transport` is given, all requests share it. If the environment names a proxy for `url`, the pool uses httpx's
    own transports. The attribute `verify` has the certificates to trust. Raises LlmschedError if the proxy's URL is
    malformed.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._shared = transport
        self._free: list[httpx.AsyncBaseTransport] = []
        self.proxy = proxy_for(url)
        # Loading certificates takes tens of milliseconds: do it once, and only for https.
        self.verify = httpx.create_ssl_context(verify=url.startswith("https:"))

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[httpx.AsyncBaseTransport]:
        """Lend a transport while the block runs. A transport that is not shared runs one request at a time."""
        if self._shared is not None:
            yield self._shared
            return
        if self._free:
            transport = self._free.pop()
        elif self.proxy is None:
            transport = Http1Transport(self.verify)
        else:
            transport = httpx.AsyncHTTPTransport(self.verify, proxy=self.proxy)
        try:
            yield transport
        finally:
            self._free.append(transport)

    async def close(self) -> None:
        for transport in self._free:
            await transport.aclose()
