"""Fake OpenAI-compatible server without a socket. A script determines its responses and their times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Script:
    """Script of one response. `parts` are bytes with the time at which they are sent, in seconds after connecting.

    Connecting takes `connect` seconds. `cut` breaks the connection after the last part, `hang` never ends the response,
    and `refused` refuses the connection.
    """

    parts: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    connect: float = 0.0
    cut: bool = False
    hang: bool = False
    refused: bool = False
    content_type: str = "text/event-stream"
    headers: Mapping[str, str] = field(default_factory=dict)


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(text: str = " x", **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more})


def usage(output: int, prompt: int = 8, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": output, **details}}


def end(output: int | None = None, **counts: Any) -> bytes:
    """Return the end of a stream: the usage chunk, unless `output` is None, and [DONE]."""
    stated = b"" if output is None else event({"choices": [], **usage(output, **counts)})
    return stated + b"data: [DONE]\n\n"


def steady(count: int, first: float, gap: float, **counts: Any) -> Script:
    """Return a script that sends `count` tokens and then the usage.

    The first token is sent after `first` seconds, and the others at intervals of `gap` seconds.
    """
    parts = [(first + gap * index, token()) for index in range(count)]
    return Script([*parts, (first + gap * (count - 1), end(count, **counts))])


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """Server that answers completion request number n (from 0) with `script(n)`, and records requests and times."""

    script: Callable[[int], Script]
    models: dict[str, Any] | None = None
    metrics: Callable[[], str] | None = None
    other: Callable[[str], httpx.Response] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=self.models) if self.models else httpx.Response(404)
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics()) if self.metrics else httpx.Response(404)
        if request.method == "GET":
            return self.other(request.url.path) if self.other else httpx.Response(404)
        number = len(self.bodies)
        self.bodies.append(json.loads(request.content))
        self.paths.append(request.url.path)
        self.times.append(asyncio.get_running_loop().time())
        script, trace = self.script(number), request.extensions["trace"]
        if script.refused:
            await trace("connection.connect_tcp.started", {})
            raise httpx.ConnectError("refused")
        if script.connect:
            await trace("connection.connect_tcp.started", {})
            await asyncio.sleep(script.connect)
            await trace("connection.connect_tcp.complete", {})
        await trace("http11.send_request_headers.started", {})
        head = {"content-type": script.content_type, **script.headers}
        return httpx.Response(script.status, headers=head, stream=_Body(script, self))


class _Body(httpx.AsyncByteStream):
    def __init__(self, script: Script, server: FakeServer) -> None:
        self._script = script
        self._server = server

    async def __aiter__(self) -> AsyncIterator[bytes]:
        server = self._server
        server.running += 1
        server.most_running = max(server.most_running, server.running)
        try:
            async for part in self._parts():
                yield part
        finally:
            server.running -= 1

    async def _parts(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        for at, part in self._script.parts:
            await asyncio.sleep(start + at - loop.time())
            yield part
        if self._script.hang:
            await asyncio.sleep(1e6)
        if self._script.cut:
            raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")
