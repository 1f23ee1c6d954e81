"""Connections of the HTTP server: their number, their deadlines, and the framing of the requests on them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from functools import partial
from typing import Any

import httptools
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.cli.serve.middleware import REQUEST_ID, RequestIds, new_id

logger = logging.getLogger(__name__)

#: Largest head of a request (request line and headers).
MAX_HEAD_BYTES = 32 << 10
#: Chunks that a body may have besides one for every MIN_CHUNK_BYTES bytes. Tiny chunks take long to parse.
FREE_CHUNKS = 1024
MIN_CHUNK_BYTES = 128
#: After a refusal, the server discards the rest of the request for this long, so that the client reads the answer.
_LINGER_S = 5.0
#: Connections above the limit that are still accepted, so that probes are answered while all others are busy.
_SPARE = 16
#: Seconds before each ping to a client that stopped sending. Some clients take at most five answers of the status 100.
_PINGS_S = (0.2, 0.1, 0.4, 0.8)
#: Requests that begin before the event loop turns to other work, such as probes and the tokens of streams.
_REQUEST_BATCH = 8
_LOG_INTERVAL_S = 60.0
_PROBES = frozenset({"/health", "/ready", "/metrics"})


class ConnectionPool:
    """Pool of open connections: at most `limit`, and a few more for probes of /health, /ready and /metrics."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.limit = limits.connections()
        self.new: dict[Connection, None] = {}  # no request yet
        self.idle: dict[Connection, None] = {}  # every request has its answer
        self.busy: dict[Connection, None] = {}
        self.beginning = asyncio.Semaphore(_REQUEST_BATCH)
        self._last_log = -math.inf

    def add(self, connection: Connection) -> bool:
        """Add a new connection; at the limit, close one that has no request. Return False if there is no room."""
        num_open = len(self.new) + len(self.idle) + len(self.busy)
        if num_open >= self.limit:
            self._log(f"{num_open} connections are open; at most {self.limit} may be (max_connections)")
            victim = next(iter(self.new or self.idle), None)
            if victim is not None:
                self.move(victim, None)
                victim.transport.abort()
            elif num_open >= self.limit + _SPARE:
                return False
        self.new[connection] = None
        return True

    def move(self, connection: Connection, to: dict[Connection, None] | None) -> None:
        """Move a connection to `new`, `idle` or `busy`, or forget it if `to` is None."""
        for each in (self.new, self.idle, self.busy):
            each.pop(connection, None)
        if to is not None:
            to[connection] = None

    @property
    def overloaded(self) -> bool:
        """True if more than `limit` connections have a request, so that only probes are answered."""
        return len(self.busy) > self.limit

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log one line if a connection cannot be accepted, because asyncio tries again.

        Handle other errors as usual.
        """
        if "socket" in context and isinstance(error := context.get("exception"), OSError):
            self._log(f"cannot accept connections: {error.strerror or error}")
        else:
            loop.default_exception_handler(context)

    def _log(self, message: str) -> None:
        if time.monotonic() - self._last_log >= _LOG_INTERVAL_S:
            self._last_log = time.monotonic()
            logger.warning("%s", message)


class Connection(HttpToolsProtocol):
    """HTTP/1.1 connection that bounds the time and the cost of each part of a request."""

    def __init__(self, pool: ConnectionPool, **given: Any) -> None:
        super().__init__(**given)
        self._pool = pool
        self._limits = pool.limits
        self._app, self.app = self.app, RequestIds(self._answer)
        self._deadline: asyncio.TimerHandle | None = None
        self._pings: asyncio.Task[None] | None = None
        self._in_head = self._in_body = False
        self._head_bytes = self._body_bytes = self._num_chunks = 0
        self._refusal: ApiError | None = None
        #: True if nothing more is parsed: the connection ends after the answers to the requests so far.
        self._discards = False
        self._has_eof = False
        #: True if the answer is a stream of server-sent events.
        self.streams_events = False

    # -- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._send_watch = SendWatch(transport, self._limits.send_timeout)
        self._expect(self._limits.header_timeout)
        if not self._pool.add(self):
            self._refuse(_overloaded())

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.move(self, None)
        self._send_watch.stop()
        for pending in (self._deadline, self._pings, self.timeout_keep_alive_task):
            if pending is not None:
                pending.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._ignore_upgrade(data[stop.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "the request is not valid HTTP/1.1"))
        else:
            if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio keeps the connection open if this returns True
        """Handle the end of the client's data. If complete requests have no answer yet, stay open to answer them."""
        if self.cycle is None or self.cycle.response_complete or self._awaits_body:
            return False
        self._has_eof = True
        self._refuse(ApiError(400, "the connection was closed within the request"))
        self._pings = self.loop.create_task(_ping(self))
        return True

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request again without its Upgrade header. `rest` has the bytes after the headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(405, "this server is not a proxy"))
            return
        # The parser would not read the body of a request with an Upgrade header.
        offer = (b"connection", b"upgrade", b"http2-settings")
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name not in offer)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(method + b" " + self.url + b" HTTP/1.1\r\n" + fields + b"\r\n" + rest)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_watch.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._send_watch.stop()

    # -- called by the parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head = True
        self._head_bytes = self._body_bytes = self._num_chunks = 0
        if self.cycle is not None:  # the first request has had its deadline since the connection was made
            self._expect(self._limits.header_timeout)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = _head_too_large()  # `data_received` answers with it
            raise self._refusal
        self._in_head, self._in_body = False, True
        self._pool.move(self, self._pool.busy)
        super().on_headers_complete()
        self._expect(self._limits.body_timeout)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > FREE_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
            self._refusal = ApiError(
                400,
                f"the body has {self._num_chunks} chunks for {self._body_bytes} bytes; after {FREE_CHUNKS} chunks, "
                f"send at least {MIN_CHUNK_BYTES} bytes per chunk, or the Content-Length",
            )
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._in_body = False
        if self._deadline is not None:
            self._deadline.cancel()

    # -- answers and endings ----------------------------------------------------------------------------------

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application. If no further request will be parsed, close the connection after the answer."""

        async def receive_valid() -> Any:
            message = await receive()
            if self._refusal is not None and self._awaits_body:
                raise self._refusal
            return message

        async def send_on(message: Any) -> None:
            is_start = message["type"] == "http.response.start"
            is_last = is_start and (self._awaits_body or (self._discards and not self.pipeline))
            if is_start:
                self.streams_events = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            if is_last:
                self._discards = True
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)
            if is_last:
                self.cycle.keep_alive = True  # else uvicorn would close too soon; see `on_response_complete`

        scope["state"]["write_now"] = partial(_write_now, self)
        app = self._app
        if scope["path"] not in _PROBES:
            async with self._pool.beginning:
                await asyncio.sleep(0)
            if self._pool.overloaded:
                app = _overloaded().response()
        await app(scope, receive_valid, send_on)

    @property
    def _awaits_body(self) -> bool:
        return self._in_body and not self.pipeline

    def on_response_complete(self) -> None:
        if self._discards and not self.pipeline:
            self._linger()
            return
        super().on_response_complete()
        self._send_watch.start()
        if self in self._pool.busy and self.cycle.response_complete:
            self._pool.move(self, self._pool.idle)

    def _expect(self, seconds: float) -> None:
        """Give the client `seconds` from now to send the next part of a request."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        if not self.transport.is_reading():  # the server is busy, for example with the request before
            self._expect(self._limits.header_timeout)
        elif self._discards:
            self.transport.abort()
        elif self._in_head or self._in_body:
            self._refuse(ApiError(408, "the request was not sent in time"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer an incomplete request with `error`, and parse nothing more.

        If earlier requests have no answer yet, send only their answers. If the application has the headers of this
        request, the application answers, because it may know a better reason, such as a missing key.
        """
        self._discards = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._in_body:
            self._refusal = error
            self.cycle.message_event.set()
        elif self.cycle is None or self.cycle.response_complete:
            body = to_json(error.body())
            head = {
                "Content-Type": "application/json",
                "Content-Length": len(body),
                REQUEST_ID: new_id(),
                **error.headers,
                "Connection": "close",
            }
            fields = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            self.transport.write(STATUS_LINE[error.status] + fields.encode() + b"\r\n" + body)
            self._linger()

    def _linger(self) -> None:
        """Close the connection after the answer, but let a client that is still sending read the answer first."""
        self._discards = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._pings is not None:
            self._pings.cancel()
        if self._has_eof:
            self.transport.close()
            return
        with suppress(OSError):  # the client has reset the connection
            self.transport.write_eof()
        self.transport.resume_reading()
        self._expect(_LINGER_S)


def _write_now(connection: Connection, part: bytes) -> bool:
    """Write a part of an answer at once. Return False, and write nothing, if the answer is not chunked or must wait."""
    cycle, transport = connection.cycle, connection.transport
    if connection.pipeline or connection.flow.write_paused or transport.is_closing() or not cycle.chunked_encoding:
        return False
    transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True


async def _ping(connection: Connection) -> None:
    """Send bytes that clients ignore, to find out if a client that sends no more data still reads."""
    for delay in _PINGS_S:
        await asyncio.sleep(delay)
        cycle = connection.cycle
        if not connection.pipeline and cycle.scope["http_version"] == "1.1":
            if not cycle.response_started:
                connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif connection.streams_events:
                connection.transport.write(b"3\r\n:\n\n\r\n")


class SendWatch:
    """Timer that aborts a connection if the client takes no byte of its answer for `timeout` seconds."""

    def __init__(self, transport: asyncio.Transport, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._check(math.inf)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self, before: float) -> None:
        """Abort the connection unless fewer bytes than `before` are left to send."""
        left = self._transport.get_write_buffer_size()
        if left >= before:
            self._transport.abort()
        elif left:
            self.stop()
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._check, left)


def _overloaded() -> ApiError:
    return ApiError(
        503,
        "the server has as many connections as it can hold (max_connections); try again later",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def _head_too_large() -> ApiError:
    return ApiError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
