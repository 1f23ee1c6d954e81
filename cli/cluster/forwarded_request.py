"""Request of a client, forwarded to a replica, which calls its ASGI application with it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from llmsched.cli.serve.http_body import cancel
from llmsched.cli.serve.request_context import IngressFacts


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """HTTP request whose body has been read. `token_ids` are those of its prompts, encoded, if they are known."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    root_path: str = ""
    token_ids: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, request: Request, body: bytes = b"", token_ids: tuple[bytes, ...] = (), query: bytes = b"") -> Self:
        """Return a request in a form that can be sent to a replica, with the query string `query` or else its own."""
        scope = request.scope
        client = None if request.client is None else (request.client.host, request.client.port)
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        query, root = query or scope.get("query_string", b""), scope.get("root_path", "")
        return cls(request.method, scope["path"], query, headers, body, client, root, token_ids)

    def prompts(self) -> list[list[int]] | None:
        """Return the token ids of the prompts, or None if they are not known."""
        return [array("i", encoded).tolist() for encoded in self.token_ids] or None

    def scope(self, ingress: IngressFacts) -> dict[str, Any]:
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
            "state": {"write_now": lambda part: False, "ingress": ingress},
        }


async def call_app(
    app: ASGIApp, request: ForwardedRequest, ingress: IngressFacts
) -> AsyncGenerator[list[Message], None]:
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
            await app(request.scope(ingress), receive, send)
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
