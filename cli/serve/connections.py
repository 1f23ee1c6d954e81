"""Connections of the HTTP server: their number, their deadlines, and the framing of the requests on them."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections import deque
from typing import Any

import httptools
from pydantic_core import to_json
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.limits import HttpLimits
from llmsched.cli.serve.middleware import REQUEST_ID, RequestIds, new_id

logger = logging.getLogger(__name__)

#: Largest head of a request (request line and headers).
MAX_HEAD_BYTES = 32 << 10
#: Chunks that a body may have whatever their size. Beyond them, the body must have MIN_CHUNK_BYTES per chunk, because
#: tiny chunks cost much time to parse.
FREE_CHUNKS = 1024
MIN_CHUNK_BYTES = 128
#: After a refusal, the server discards the rest of the request for this long, so that the client reads the answer.
_LINGER_S = 5.0
_MAX_DISCARDED_BYTES = 64 << 20
#: Connections above the limit that are still accepted, so that probes are answered while all others are busy.
_SPARE = 16
_ACCEPT_BATCH = 32
#: Requests that are begun before the event loop turns to other work, such as probes and the tokens of streams.
_REQUEST_BATCH = 8
#: Pause after the process ran out of file descriptors or memory.
_ACCEPT_PAUSE_S = 0.1
_LOG_INTERVAL_S = 60.0
_PROBES = frozenset({"/health", "/metrics"})


class ConnectionPool:
    """Accepted connections, at most `limit` and a few for probes.

    A connection waits while it has no request: `_new` have not sent one yet, `_idle` have. At the limit, the connection
    that has waited longest makes room for a new one, new before idle.
    """

    def __init__(self, config: Config, state: ServerState, limits: HttpLimits) -> None:
        self.limits = limits
        self.limit = limits.connections()
        self._config, self._state = config, state
        self._new: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        self._busy: set[Connection] = set()
        self._openings: set[asyncio.Task[Any]] = set()
        self._beginning: deque[asyncio.Future[None]] = deque()
        self._listeners: set[socket.socket] = set()
        self._last_log = -math.inf
        self._loop = asyncio.get_running_loop()

    def start(self, listener: socket.socket) -> None:
        """Accept connections from `listener` until `stop`."""
        self._listeners.add(listener)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def stop(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                client, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor is left: later connections wait in the kernel's backlog
                self._log(f"cannot accept connections: {error.strerror or error}")
                self._make_room()
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._resume, listener)
                return
            opening = self._loop.create_task(self._loop.connect_accepted_socket(self._connection, client))
            self._openings.add(opening)
            opening.add_done_callback(self._opened)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self.start(listener)

    def _opened(self, opening: asyncio.Task[Any]) -> None:
        self._openings.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            logger.debug("a connection ended while it was opened: %s", error)

    def _connection(self) -> Connection:
        return Connection(self, config=self._config, server_state=self._state, app_state={}, _loop=self._loop)

    def add(self, connection: Connection) -> bool:
        """Add a new connection, and close a waiting one if there are too many. Return False if none is waiting."""
        if self._open >= self.limit and not self._make_room() and self._open >= self.limit + _SPARE:
            return False
        self._new[connection] = None
        return True

    @property
    def _open(self) -> int:
        return len(self._new) + len(self._idle) + len(self._busy)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest. Return False if none waits."""
        victim = next(iter(self._new or self._idle), None)
        self._log(f"{self._open} connections are open; at most {self.limit} may be (max_connections)")
        if victim is None:
            return False
        self.remove(victim)
        victim.transport.abort()
        return True

    @property
    def overloaded(self) -> bool:
        """True if so many connections have a request that only probes are answered."""
        return len(self._busy) > self.limit

    def request_begins(self, connection: Connection) -> None:
        """Mark a connection as busy."""
        self.remove(connection)
        self._busy.add(connection)

    async def turn(self) -> None:
        """Wait until the requests that came earlier have begun, a few in each round of the event loop."""
        turn = self._loop.create_future()
        self._beginning.append(turn)
        if len(self._beginning) == 1:
            self._loop.call_soon(self._begin_some)
        await turn

    def _begin_some(self) -> None:
        for _ in range(min(_REQUEST_BATCH, len(self._beginning))):
            turn = self._beginning.popleft()
            if not turn.done():
                turn.set_result(None)
        if self._beginning:
            self._loop.call_soon(self._begin_some)

    def request_ended(self, connection: Connection) -> None:
        """Mark a connection as waiting for its next request."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def _log(self, message: str) -> None:
        """Log a warning, at most one per minute."""
        if time.monotonic() - self._last_log >= _LOG_INTERVAL_S:
            self._last_log = time.monotonic()
            logger.warning("%s", message)


class Connection(HttpToolsProtocol):
    """HTTP/1.1 connection that bounds the time and the cost of each part of a request.

    httptools parses in C, so small chunks cost little; the limits on heads and chunks are here.
    """

    def __init__(self, pool: ConnectionPool, **given: Any) -> None:
        super().__init__(**given)
        self._pool = pool
        self._limits = pool.limits
        self._app, self.app = self.app, RequestIds(self._answer)
        self._deadline: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = False
        self._head_bytes = self._body_bytes = self._num_chunks = 0
        self._refusal: ApiError | None = None
        #: Bytes discarded since the connection was closed for writing; None while it is open.
        self._discarded: int | None = None

    # -- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._expect(self._limits.header_timeout)
        if not self._pool.add(self):
            self._refuse(_overloaded())

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        self._discarded = 0
        for timer in (self._deadline, self._sending, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > _MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        self._head_bytes += len(data)
        try:
            if self._refusal is None:
                self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._ignore_upgrade(data[stop.args[0] :])
        except httptools.HttpParserError:
            self._refusal = self._refusal or ApiError(400, "the request is not valid HTTP/1.1")
            task = self.loop.create_task(self._refuse_in_turn(self._refusal))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request again without the offer of another protocol, after which the parser would read no body."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(405, "this server is no proxy"))
            return
        offer = (b"connection", b"upgrade", b"http2-settings")
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in self.headers if name not in offer)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(method + b" " + self.url + b" HTTP/1.1\r\n" + fields + b"\r\n" + rest)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

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
        self._in_head, self._in_body = False, True
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._fail(_head_too_large())
        self._pool.request_begins(self)
        super().on_headers_complete()
        self._expect(self._limits.body_timeout)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > FREE_CHUNKS + self._body_bytes // MIN_CHUNK_BYTES:
            self._fail(
                ApiError(
                    400,
                    f"the body has {self._num_chunks} chunks for {self._body_bytes} bytes; after {FREE_CHUNKS} chunks, "
                    f"send at least {MIN_CHUNK_BYTES} bytes per chunk, or the Content-Length",
                )
            )

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

    def _fail(self, error: ApiError) -> None:
        """Stop the parser; `data_received` answers with `error`."""
        self._refusal = error
        raise error

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application. An answer that comes before the end of the body closes the connection."""

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start" and self._in_body:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        app = self._app
        if scope["path"] not in _PROBES:
            await self._pool.turn()
            if self._pool.overloaded:
                app = _overloaded().response()
        await app(scope, receive, send_on)

    # -- deadlines and endings --------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._pool.request_ended(self)

    def _expect(self, seconds: float) -> None:
        """Give the client this time for the part of a request that it is sending."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        if self._discarded is not None:
            self.transport.abort()
        elif self.pipeline or (self._in_head and self._is_answering):
            self._expect(self._limits.header_timeout)  # the server is busy with the request before
        elif self._in_head or self._in_body:
            self._refuse(ApiError(408, "the request was not sent in time"))
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    async def _refuse_in_turn(self, error: ApiError) -> None:
        """Let the application answer first: it may have a better reason to refuse, such as a missing key."""
        await self._pool.turn()
        await asyncio.sleep(0)
        self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """End the connection with `error`, or without it if another answer has begun."""
        if self.transport.is_closing():
            return
        begun = False
        if self._is_answering:
            begun = self.cycle.response_started or bool(self.pipeline) or self._in_head
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not begun:
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
        self._in_body = True
        self.transport.close()

    def close(self, transport: asyncio.Transport) -> None:
        """Close the connection after its answer. A client that is still sending may first read the answer.

        Closing at once would reset the connection, and the client would lose the answer.
        """
        if self._discarded is None and (self._in_head or self._in_body):
            self._discarded = 0
            try:
                transport.write_eof()
            except OSError:  # the client has reset the connection
                transport.abort()
                return
            transport.resume_reading()
            self._expect(_LINGER_S)
        else:
            transport.close()
            self.watch_sending()

    @property
    def is_lingering(self) -> bool:
        """True once the connection only discards what the client sends."""
        return self._discarded is not None

    def watch_sending(self, before: float = math.inf) -> None:
        """Abort the connection if the client has taken nothing of its answer for `send_timeout`."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        elif left:
            if self._sending is not None:
                self._sending.cancel()
            self._sending = self.loop.call_later(self._limits.send_timeout, self.watch_sending, left)


class _LingeringTransport:
    """Transport of a Connection. `close` is the connection's; the rest is the transport's own."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._connection.close(self._transport)

    def is_closing(self) -> bool:
        return self._connection.is_lingering or self._transport.is_closing()


def _overloaded() -> ApiError:
    return ApiError(
        503,
        "the server has as many connections as it can hold (max_connections); try again later",
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def _head_too_large() -> ApiError:
    return ApiError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
