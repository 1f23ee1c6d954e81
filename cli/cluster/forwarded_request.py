"""Request of a client, forwarded to a replica, which calls its ASGI application with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from llmsched.cli.serve.http_body import cancel


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """HTTP request whose body has been read."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    root_path: str = ""

    @classmethod
    def of(cls, request: Request, body: bytes) -> Self:
        """Return a request in a form that can be sent to a replica. Its body has been read."""
        scope = request.scope
        client = None if request.client is None else (request.client.host, request.client.port)
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        query, root = scope.get("query_string", b""), scope.get("root_path", "")
        return cls(request.method, scope["path"], query, headers, body, client, root)

    def scope(self) -> dict[str, Any]:
        """Return the ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": self.root_path,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": {"write_now": lambda part: False},
        }


async def call_app(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
    """Yield the messages of the application's response, in lists of all messages that are ready at that time.

    If the generator is closed early, the application sees a disconnected client.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    disconnected = asyncio.Event()
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(request.scope(), receive, send)
        finally:
            messages.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        is_over = False
        while not is_over:
            ready = [await messages.get()]
            while not messages.empty():
                ready.append(messages.get_nowait())
            is_over = ready[-1] is None
            if found := [message for message in ready if message is not None]:
                yield found
        await running
    finally:
        disconnected.set()
        await cancel(running)
