from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmsched.cli.serve.http_body import cancel, until_disconnect

DONE = b"data: [DONE]\n\n"
#: Line of an event stream that clients ignore.
_COMMENT = b": waiting\n\n"

#: Some clients end a line of an event stream at these characters, so the JSON must escape them.
_LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in ("\x85", "\u2028", "\u2029")}


def json_line(content: Any) -> bytes:
    """Return JSON on one line. Every character that may end a line is escaped."""
    line = to_json(content)
    if not line.isascii():
        for char, escaped in _LINE_BREAKS.items():
            line = line.replace(char, escaped)
    return line


def event(content: Any) -> bytes:
    return b"data: " + json_line(content) + b"\n\n"


class EventStream(Response):
    """Response that streams events. It calls `close` when the stream ends or fails, or the client disconnects.

    `events(write)` returns an iterator of events. `write` sends an event at once, or returns False without sending it;
    then the iterator must yield this event. After `keep_alive_s` seconds without an event (0: never), the response
    sends a comment, so that proxies keep the connection.
    """

    def __init__(
        self,
        events: Callable[[Callable[[bytes], bool]], AsyncGenerator[bytes, None]],
        close: Callable[[], None],
        keep_alive_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        plain = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers={**plain, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._keep_alive_s = keep_alive_s
        self._is_silent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send, scope["state"]["write_now"]))
        except ClientDisconnect:
            return
        finally:
            self._close()

    async def _send(self, send: Send, write_now: Callable[[bytes], bool]) -> None:
        def write(events: bytes) -> bool:
            self._is_silent = False
            return write_now(events)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        comments = asyncio.ensure_future(self._send_comments(send))
        try:
            async with aclosing(self._events(write)) as events:
                async for chunk in events:
                    self._is_silent = False
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await cancel(comments)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        while self._keep_alive_s:
            self._is_silent = True
            await asyncio.sleep(self._keep_alive_s)
            if self._is_silent:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
