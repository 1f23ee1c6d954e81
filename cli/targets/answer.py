"""Reader of streamed answers from any OpenAI-compatible server.

Servers end a stream with [DONE] or only with a finish reason. They report an error as an event of type "error", as a
JSON object with an error, or as a line `error: ...` in place of `data: ...` (llama.cpp).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

import httpx

from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord
from llmsched.cli.targets.sse import Event, EventParser

#: Seconds to wait after [DONE] for the response to end, so that its connection can be reused.
_LINGER_S = 0.5

#: Field that a server rejects -> flag that leaves the field out.
_REFUSED_FIELDS = {
    "ignore_eos": "--stop-at-eos leaves it out",
    "stream_options": "--no-usage leaves it out",
    "prompt": "--text-prompts sends words, not token ids",
}

#: HTTP status of another refusal -> flag that may help.
_REMEDIES = {
    401: "--api-key sends a key",
    403: "--api-key sends a key",
    404: "--endpoint chooses the API, --served-model-name the model",
}

#: Bytes of an answer that are kept for the error message if it is not a stream.
_QUOTED = 2000

#: Characters of a server's message that are quoted.
_DETAIL_LENGTH = 300

#: Largest plausible token count. A larger one is the server's error, and its samples would exhaust the memory.
_MAX_TOKENS = 1_000_000


async def read_answer(response: httpx.Response, record: RequestRecord, now: Callable[[], float]) -> None:
    """Record the chunks, the usage and the end of an answer. `now` returns the event loop's time in seconds.

    Raises RequestFailed if the server refuses the request, or if the answer is not a stream, has no token, or ends with
    neither [DONE] nor a finish reason.
    """
    if response.status_code != httpx.codes.OK:
        await response.aread()
        raise RequestFailed(f"http {response.status_code}", _refusal(response))
    try:
        async with asyncio.timeout(None) as patience:
            await _read_stream(response, record, now, patience)
    except (httpx.DecodingError, ValueError) as problem:
        if record.end is None:
            raise RequestFailed("not understood", shorten(str(problem))) from problem
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
    said, headers = shorten(response.text), response.headers
    more = [f"{name}: {shorten(headers[name])}" for name in ("Location", "Retry-After") if name in headers]
    if response.status_code in (400, 422):
        more += [remedy for field, remedy in _REFUSED_FIELDS.items() if field in said][:1]
    elif response.status_code in _REMEDIES:
        more.append(_REMEDIES[response.status_code])
    return " ".join([*([said] if said else []), *(f"({one})" for one in more)])


async def _read_stream(
    response: httpx.Response, record: RequestRecord, now: Callable[[], float], patience: asyncio.Timeout
) -> None:
    """Record all events of an answer. After [DONE], `patience` limits the wait for the end of the response."""
    arrived, parser = response.extensions.get("arrived", now), EventParser()
    beginning, any_event = b"", False
    body: AsyncIterable[bytes] = response.aiter_bytes()
    if "content-encoding" not in response.headers and isinstance(response.stream, httpx.AsyncByteStream):
        body = response.stream  # httpx is slow, and needed only to decompress
    async for received in body:
        events = parser.feed(received)
        any_event = any_event or bool(events)
        if not any_event:
            beginning = (beginning + received)[:_QUOTED]
        for event in events:
            if record.end is None and _note_event(event, record, arrived()):
                patience.reschedule(now() + _LINGER_S)
    if (last := parser.close()) is not None and record.end is None:
        _note_event(last, record, now())
    elif not any_event and beginning.strip():
        raise RequestFailed("not a stream", shorten(beginning.decode("utf-8", errors="replace")))


def _note_event(event: Event, record: RequestRecord, time: float) -> bool:
    """Record an event. Return True for [DONE], the last event. Raises RequestFailed for an error or invalid data."""
    said = event.data.strip()
    if said == "[DONE]":
        record.end = time
        return True
    if event.type == "error":
        raise RequestFailed("error event", shorten(said))
    if said:
        try:
            content = json.loads(said)
        except (ValueError, RecursionError) as problem:
            raise RequestFailed("not understood", shorten(said)) from problem
        if not isinstance(content, dict):
            raise RequestFailed("not understood", shorten(said))
        _note_content(content, said, record, time)
    return False


def _note_content(content: dict[str, Any], said: str, record: RequestRecord, time: float) -> None:
    if content.get("error") is not None or content.get("object") == "error":
        raise RequestFailed("error event", shorten(said))
    if record.request_id is None and isinstance(name := content.get("id"), str):
        record.request_id = name
    counted = None
    if isinstance(usage := content.get("usage"), dict):
        before, record.usage = record.usage, _usage(usage, record.usage)
        if record.usage.output_tokens is not None:
            counted = max(0, record.usage.output_tokens - (before.output_tokens or 0))
    choices = content.get("choices")
    if not isinstance(choices, list):
        return
    # Only the choice with index 0 was requested.
    choice = next((one for one in choices if isinstance(one, dict) and not one.get("index")), None)
    if choice is None:
        return
    if isinstance(ids := choice.get("token_ids"), list):
        counted = len(ids)
    record.chunks.append(Chunk(time, _text(choice), counted))
    if isinstance(reason := choice.get("finish_reason"), str):
        record.finish_reason = reason
        if reason in ("abort", "error"):  # the server did not complete the request
            raise RequestFailed(f"ended by {reason}", f"after {len(record.chunks)} chunks")


def _text(choice: dict[str, Any]) -> str:
    """Return all output text of a choice: the reasoning, the answer, and the names and arguments of tool calls."""
    if isinstance(text := choice.get("text"), str):
        return text
    if not isinstance(delta := choice.get("delta"), dict):
        return ""
    # A server that sends both names of the reasoning sends the same text under both.
    parts = [_joined(delta.get("reasoning_content")) or _joined(delta.get("reasoning")), _joined(delta.get("content"))]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            parts += [_joined(function.get("name")), _joined(function.get("arguments"))]
    return "".join(parts)


def _joined(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: Iterable[Any] = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _usage(usage: dict[str, Any], before: ReportedUsage) -> ReportedUsage:
    """Return the token counts of a usage object. Missing counts are taken from `before`."""
    details = usage.get("prompt_tokens_details")
    output = _count(usage.get("completion_tokens"), before.output_tokens)
    if output is not None and output > _MAX_TOKENS:
        raise RequestFailed("not understood", f"a usage of {output} completion_tokens")
    return ReportedUsage(
        prompt_tokens=_count(usage.get("prompt_tokens"), before.prompt_tokens),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else None, before.cached_tokens),
        output_tokens=output,
    )


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def shorten(text: str) -> str:
    """Return a server's message as one line of limited length, without control characters."""
    words = " ".join(text[: 4 * _DETAIL_LENGTH].split())
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in words)
    return line if len(line) <= _DETAIL_LENGTH else line[:_DETAIL_LENGTH] + "..."
