from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Content:
    text: str
    messages: tuple[Message, ...] | None = None

    @staticmethod
    def of_messages(messages: Sequence[Message]) -> Content:
        """Return the prompt of a chat. Its `text`, for targets without chat, joins the messages with blank lines."""
        contents = [message.get("content") or () for message in messages]
        texts = [said if isinstance(said, str) else "".join(part["text"] for part in said) for said in contents]
        return Content("\n\n".join(texts), tuple(messages))

    @property
    def words(self) -> list[str]:
        return self.text.split()


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request of a trace, with the prompt `content` or a prompt of `input_len` tokens."""

    line: int  # number of the line (or entry) in the file
    offset: float  # seconds after the first request
    input_len: int | None = None
    output_len: int | None = None  # tokens; None if `answer` is known or the length is unknown
    hash_ids: tuple[int, ...] = ()  # names of the blocks of a prompt without `content`
    content: Content | None = None
    answer: str | None = None

    @property
    def words_in(self) -> int:
        """Length of the prompt in tokens. Each word of a text counts as one token."""
        return len(self.content.words) if self.content is not None else self.input_len or 0

    def answer_len(self, count: Callable[[str], int] = lambda text: len(text.split())) -> int | None:
        """Return the length of the answer in tokens, or None if unknown. `count` counts the tokens of a text."""
        return self.output_len if self.output_len is not None or self.answer is None else count(self.answer)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a file, in the order of their offsets."""

    name: str
    format: str
    requests: tuple[TraceRequest, ...]
    timed: bool  # True if the file states times
    block_tokens: int = 512  # tokens per block of a request's `hash_ids`
    notes: tuple[str, ...] = ()  # how the file was understood, and what was left out

    @property
    def rate(self) -> float:
        """Requests per second from the first request to the last, or 0 if all have the same time."""
        span = self.requests[-1].offset - self.requests[0].offset
        return (len(self.requests) - 1) / span if span > 0 else 0.0

    @property
    def of_text(self) -> bool:
        return any(request.content is not None for request in self.requests)


def digest(requests: Sequence[TraceRequest]) -> str:
    found = hashlib.sha256()
    for request in requests:
        content = request.content
        said = None if content is None else content.text if content.messages is None else content.messages
        facts = [round(request.offset * 1e6), request.input_len, request.output_len, request.hash_ids]
        found.update(json.dumps([*facts, said, request.answer], sort_keys=True).encode() + b"\n")
    return found.hexdigest()
