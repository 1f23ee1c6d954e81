from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from llmsched.cli.serve.api_errors import ApiError

T = TypeVar("T")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body. Raises ApiError 413 if it has more than `max_bytes`, without reading the rest."""
    length = request.headers.get("content-length", "")
    chunks, size = [], int(length) if length.isdigit() else 0
    if size <= max_bytes:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                break
            chunks.append(chunk)
    if size > max_bytes:
        raise ApiError(
            413,
            f"the body is larger than {max_bytes} bytes, the most that this server accepts (max_body_size)",
            code="request_too_large",
        )
    return b"".join(chunks)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect."""

    async def disconnected() -> None:
        # This discards messages, so the body must have been read.
        while (await receive())["type"] != "http.disconnect":
            pass

    job = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({job, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        await cancel(job)
        await cancel(watcher)


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has ended. Its result or error is dropped."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
