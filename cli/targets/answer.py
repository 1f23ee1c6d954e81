"""Reading a streamed answer as it comes, whichever OpenAI-compatible server it is of.

Servers differ in what they put into chunks and in how they end and fail: [DONE] or just a finish reason, an error as an
event of that type, as an object, or as a field `error:` beside `data:` (llama.cpp).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable

import httpx

from llmsched.cli.figures.record import RequestFailed, RequestRecord
from llmsched.cli.targets.chunks import note, shorten
from llmsched.cli.targets.sse import EventParser

#: How long to wait after [DONE] for the response to be over, so that its connection can be used again.
_LINGER_S = 0.5

#: What a server that refuses a field of the request says, and the flag that leaves the field out.
_WAYS_OUT = {
    "ignore_eos": "--stop-at-eos leaves it out",
    "stream_options": "--no-usage leaves it out",
    "prompt": "--text-prompts sends words, not token ids",
}
_REFUSALS = frozenset({400, 422})

#: What helps against other statuses.
_REMEDIES = {
    401: "--api-key sends a key",
    403: "--api-key sends a key",
    404: "--endpoint chooses the API, --served-model-name the model",
}

#: As much of an answer is kept to be quoted if it is no stream.
_QUOTED = 2000


async def read_answer(response: httpx.Response, record: RequestRecord, now: Callable[[], float]) -> None:
    """Note chunks, usage and the end of an answer on the record.

    Raises RequestFailed unless it is a stream with at least one token that comes to its end: [DONE], or the end of the
    response after a finish reason.
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
    """What the server said, and what it says of where or when else, and the flag that may please it."""
    said = shorten(response.text)
    more = [
        f"{name}: {shorten(response.headers[name])}" for name in ("Location", "Retry-After") if name in response.headers
    ]
    if response.status_code in _REFUSALS:
        more += [way for field, way in _WAYS_OUT.items() if field in said][:1]
    elif response.status_code in _REMEDIES:
        more.append(_REMEDIES[response.status_code])
    return " ".join([*([said] if said else []), *(f"({one})" for one in more)])


async def _read_stream(
    response: httpx.Response, record: RequestRecord, now: Callable[[], float], patience: asyncio.Timeout
) -> None:
    """Note all events, and the end at [DONE], after which there is little `patience`.

    Their time is when their last byte was received, if the transport tells that. Raises RequestFailed for an answer
    that has no event at all.
    """
    arrived, parser = response.extensions.get("arrived", now), EventParser()
    beginning, any_event = b"", False
    async for received in _content(response):
        events = parser.feed(received)
        any_event = any_event or bool(events)
        if not any_event:
            beginning = (beginning + received)[:_QUOTED]
        for event in events:
            if record.end is None and note(event, record, arrived()):
                patience.reschedule(now() + _LINGER_S)
    last = parser.close()
    if last is not None and record.end is None:
        note(last, record, now())
    elif not any_event and beginning.strip():
        raise RequestFailed("not a stream", shorten(beginning.decode("utf-8", errors="replace")))


def _content(response: httpx.Response) -> AsyncIterable[bytes]:
    """The body as it comes; httpx, which takes its time, is asked only where something is to be decoded."""
    if "content-encoding" not in response.headers and isinstance(response.stream, httpx.AsyncByteStream):
        return response.stream
    return response.aiter_bytes()
