"""What the events of a streamed answer hold, whichever OpenAI-compatible server it is of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from llmsched.cli.figures.record import Chunk, RequestFailed, RequestRecord, TokenUsage
from llmsched.cli.targets.sse import Event

_DETAIL_LENGTH = 300

#: Finish reasons of a request that the server did not serve to its end.
_UNSERVED = frozenset({"abort", "error"})

#: More tokens than any answer has: a count beyond is a mistake, and a sample for each would fill the memory.
_MOST_TOKENS = 1_000_000


def note(event: Event, record: RequestRecord, time: float) -> bool:
    """Put an event on the record; True if it is the last. Raises RequestFailed for an error, and for nonsense."""
    said = event.data.strip()
    if said == "[DONE]":
        record.end = time
        return True
    if event.type == "error":
        raise RequestFailed("error event", shorten(said))
    if said:
        _note_content(_parsed(said), said, record, time)
    return False


def _parsed(said: str) -> dict[str, Any]:
    try:
        content = json.loads(said)
    except (ValueError, RecursionError) as problem:
        raise RequestFailed("not understood", shorten(said)) from problem
    if not isinstance(content, dict):
        raise RequestFailed("not understood", shorten(said))
    return content


def _note_content(content: dict[str, Any], said: str, record: RequestRecord, time: float) -> None:
    """Only what has choices can hold a token."""
    if content.get("error") is not None or content.get("object") == "error":
        raise RequestFailed("error event", shorten(said))
    if record.request_id is None and isinstance(name := content.get("id"), str):
        record.request_id = name
    counted = None
    if isinstance(usage := content.get("usage"), dict):
        before, record.usage = record.usage, _usage(usage, record.usage)
        if record.usage.output_tokens is not None:
            counted = max(0, record.usage.output_tokens - (before.output_tokens or 0))
    if (choice := _choice(content.get("choices"))) is None:
        return
    if isinstance(ids := choice.get("token_ids"), list):
        counted = len(ids)
    record.chunks.append(Chunk(time, _text(choice), counted))
    if isinstance(reason := choice.get("finish_reason"), str):
        record.finish_reason = reason
        if reason in _UNSERVED:
            raise RequestFailed(f"ended by {reason}", f"after {len(record.chunks)} chunks")


def _choice(choices: Any) -> dict[str, Any] | None:
    """The one that was asked for, should there be others."""
    if not isinstance(choices, list):
        return None
    return next((one for one in choices if isinstance(one, dict) and not one.get("index")), None)


def _text(choice: dict[str, Any]) -> str:
    """All the output in a choice, whether answer, reasoning or the arguments of a tool call."""
    if isinstance(text := choice.get("text"), str):
        return text
    if not isinstance(delta := choice.get("delta"), dict):
        return ""
    # Where both names of the reasoning are there, they are of the same text.
    parts = [_joined(delta.get("reasoning_content")) or _joined(delta.get("reasoning")), _joined(delta.get("content"))]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            parts += [_joined(function.get("name")), _joined(function.get("arguments"))]
    return "".join(parts)


def _joined(content: Any) -> str:
    """A text, or the texts of a list of parts; nothing if it is neither."""
    if isinstance(content, str):
        return content
    parts: Iterable[Any] = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _usage(usage: dict[str, Any], before: TokenUsage) -> TokenUsage:
    """The counts of a usage object; what it leaves out stays as it was stated before."""
    details = usage.get("prompt_tokens_details")
    output = _count(usage.get("completion_tokens"), before.output_tokens)
    if output is not None and output > _MOST_TOKENS:
        raise RequestFailed("not understood", f"a usage of {output} completion_tokens")
    return TokenUsage(
        prompt_tokens=_count(usage.get("prompt_tokens"), before.prompt_tokens),
        cached_tokens=_count(details.get("cached_tokens") if isinstance(details, dict) else None, before.cached_tokens),
        output_tokens=output,
    )


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise


def shorten(text: str) -> str:
    """One line of what a server said, without what would steer a terminal."""
    line = "".join(
        letter if letter.isprintable() else "\ufffd" for letter in " ".join(text[: 4 * _DETAIL_LENGTH].split())
    )
    return line if len(line) <= _DETAIL_LENGTH else line[:_DETAIL_LENGTH] + "..."
