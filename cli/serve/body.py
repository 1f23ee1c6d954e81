"""Reading a request's body within bounds, and noticing when its sender has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from llmsched.cli.serve.api_errors import ApiError

T = TypeVar("T")

#: Room for a prompt of a million token ids, or a million tokens of text.
MAX_BODY_BYTES = 8 << 20
#: Of a body that is too large this much is read and thrown away, so that its sender gets to read the answer.
_MAX_DISCARDED_BYTES = 64 << 20


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError 413 beyond MAX_BODY_BYTES, never holding more than that in memory."""
    length = request.headers.get("content-length", "")
    declared = int(length) if length.isdigit() else 0
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if max(size, declared) <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()
        if size > _MAX_DISCARDED_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise ApiError(
            413,
            f"the body has more than {MAX_BODY_BYTES} bytes, which is what this server reads",
            code="request_too_large",
            headers={"Connection": "close"},
        )
    return b"".join(chunks)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it and raise ClientDisconnect as soon as the client leaves. Call after the body was read."""
    job = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        await _cancel(job)
        await _cancel(watcher)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel and wait, so that whatever the task cleans up has happened."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
