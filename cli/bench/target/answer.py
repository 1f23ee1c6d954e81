"""Reading a streamed answer as it comes, whichever OpenAI-compatible server it is of.

Servers differ in what they put into chunks and in how they end and fail: [DONE] or just a finish reason, an error as an
event of that type, as an object, or as a field `error:` beside `data:` (llama.cpp).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Callable
from typing import Any

import httpx

from llmsched.cli.bench.figures.record import Chunk, RequestFailed, RequestRecord, Usage
from llmsched.cli.bench.target.sse import Event, EventParser

_DETAIL_LENGTH = 300

#: How long to wait after [DONE] for the response to be over, so that its connection can be used again.
_LINGER_S = 0.5

#: Finish reasons of a request that the server did not serve to its end.
_UNSERVED = frozenset({"abort", "error"})

#: What a server that refuses a field of the request says, and the flag that leaves the field out.
_WAYS_OUT = {"ignore_eos": "--stop-at-eos leaves it out", "prompt": "--text-prompts sends words, not token ids"}
_REFUSALS = frozenset({400, 422})


async def read_answer(response: httpx.Response, record: RequestRecord, now: Callable[[], float]) -> None:
    """Note chunks, usage and the end of an answer on the record.

    Raises RequestFailed unless it is a stream with at least one token that comes to its end: [DONE], or the end of the
    response after a finish reason.
    """
    if response.status_code != httpx.codes.OK:
        await response.aread()
        raise RequestFailed(f"http {response.status_code}", _refusal(response))
    if response.headers.get("content-type", "").startswith("application/json"):
        await response.aread()
        raise RequestFailed("not a stream", shorten(response.text))
    try:
        async with asyncio.timeout(None) as patience:
            await _read_stream(response, record, now, patience)
    except (TimeoutError, httpx.RequestError):
        if record.end is None:
            raise
    if not any(chunk.text or chunk.tokens for chunk in record.chunks):
        raise RequestFailed("empty stream", "the response ended without a token")
    if record.end is None:
        if record.finish_reason is None:
            raise RequestFailed("cut without [DONE]", f"after {len(record.chunks)} chunks")
        record.end = now()


def _refusal(response: httpx.Response) -> str:
    """What the server said, and the flag that would please it where the field it refuses is known."""
    said = shorten(response.text)
    if response.status_code in _REFUSALS and (hint := next((w for f, w in _WAYS_OUT.items() if f in said), None)):
        return f"{said} ({hint})"
    return said


async def _read_stream(
    response: httpx.Response, record: RequestRecord, now: Callable[[], float], patience: asyncio.Timeout
) -> None:
    """Note all events, and the end at [DONE], after which there is little `patience`.

    Their time is when their last byte was received, if the transport tells that.
    """
    arrived, parser = response.extensions.get("arrived", now), EventParser()
    async for received in _content(response):
        for event in parser.feed(received):
            if record.end is None and _note(event, record, arrived()):
                patience.reschedule(now() + _LINGER_S)
    if record.end is None and (last := parser.close()) is not None:
        _note(last, record, now())


def _content(response: httpx.Response) -> AsyncIterable[bytes]:
    """The body as it comes; httpx, which takes its time, is asked only where something is to be decoded."""
    if "content-encoding" not in response.headers and isinstance(response.stream, httpx.AsyncByteStream):
        return response.stream
    return response.aiter_bytes()


def _note(event: Event, record: RequestRecord, time: float) -> bool:
    """Put an event on the record; True if it is the last."""
    if event.data.strip() == "[DONE]":
        record.end = time
        return True
    _note_event(event, record, time)
    return False


def _note_event(event: Event, record: RequestRecord, time: float) -> None:
    """Put one event on the record; only a chunk with choices can hold a token."""
    if event.type == "error":
        raise RequestFailed("error event", shorten(event.data))
    if not event.data.strip():
        return
    try:
        content = json.loads(event.data)
    except ValueError as problem:
        raise RequestFailed("not understood", shorten(event.data)) from problem
    if not isinstance(content, dict):
        raise RequestFailed("not understood", shorten(event.data))
    if content.get("error") is not None or content.get("object") == "error":
        raise RequestFailed("error event", shorten(event.data))
    if record.request_id is None and isinstance(name := content.get("id"), str):
        record.request_id = name
    counted = None
    if isinstance(usage := content.get("usage"), dict):
        before, record.usage = record.usage, _usage(usage, record.usage)
        if record.usage.output_tokens is not None:
            counted = max(0, record.usage.output_tokens - (before.output_tokens or 0))
    choices = content.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        if isinstance(ids := choices[0].get("token_ids"), list):
            counted = len(ids)
        record.chunks.append(Chunk(time, _text(choices[0]), counted))
        if isinstance(reason := choices[0].get("finish_reason"), str):
            record.finish_reason = reason
            if reason in _UNSERVED:
                raise RequestFailed(f"ended by {reason}", f"after {len(record.chunks)} chunks")


def _text(choice: dict[str, Any]) -> str:
    """All the output in a choice, whether answer, reasoning or the arguments of a tool call."""
    if isinstance(text := choice.get("text"), str):
        return text
    if not isinstance(delta := choice.get("delta"), dict):
        return ""
    parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def _usage(usage: dict[str, Any], before: Usage) -> Usage:
    """The counts of a usage object; what it leaves out stays as it was stated before."""
    details = usage.get("prompt_tokens_details")
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens"), before.prompt_tokens),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else None, before.cached_tokens),
        output_tokens=_count(usage.get("completion_tokens"), before.output_tokens),
    )


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def shorten(text: str) -> str:
    """One line of what a server said."""
    line = " ".join(text.split())
    return line if len(line) <= _DETAIL_LENGTH else line[:_DETAIL_LENGTH] + "..."
