"""The answers of the server that the bench checks itself against: which bytes at which time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Ending = Literal["done", "cut", "refused", "error"]


@dataclass(frozen=True, slots=True)
class Part:
    """What is written `at` so many seconds after the request has come, and the tokens in it."""

    at: float
    text: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """One answer. It ends with a usage chunk and [DONE], without them, with an error event, or is an HTTP error."""

    parts: tuple[Part, ...]
    ending: Ending = "done"
    role_first: bool = False

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


def steady(count: int, first: float, gap: float, *, tokens: int = 1, ending: Ending = "done") -> Script:
    """`count` chunks, `gap` seconds apart, of `tokens` tokens each."""
    return Script(tuple(Part(first + gap * n, " x" * tokens, tokens) for n in range(count)), ending)


def _with_stall(script: Script, after: int, seconds: float) -> Script:
    parts = [
        Part(part.at + (seconds if index >= after else 0.0), part.text, part.tokens)
        for index, part in enumerate(script.parts)
    ]
    return Script(tuple(parts), script.ending)


def _after_role(script: Script) -> Script:
    """The same after two chunks without a token, as chats begin."""
    return Script((Part(0.01, ""), Part(0.02, ""), *script.parts), script.ending, role_first=True)


_PLAIN = steady(40, 0.1, 0.02)

#: By the name that stands first in the path of the URL; the n-th request of a name gets its n-th script, in turn.
SCRIPTS: Mapping[str, tuple[Script, ...]] = {
    "steady": (_PLAIN,),
    "chunks": (steady(5, 0.1, 0.2, tokens=10),),
    "role": (_after_role(steady(20, 0.15, 0.02)),),
    "stall": (_with_stall(_PLAIN, 20, 0.5),),
    "crowd": (steady(75, 0.1, 0.02),),
    "rate": (steady(1, 0.0, 0.0),),
    "warm-up": (steady(1, 0.0, 0.0),),
    "failures": (
        _PLAIN,
        steady(3, 0.05, 0.02, ending="cut"),
        steady(3, 0.05, 0.02, ending="error"),
        Script((), "refused"),
        Script(()),
    ),
}


def chunk(script: Script, part: Part, *, chat: bool) -> bytes:
    """A part as a server-sent event."""
    if not chat:
        return event({"choices": [{"index": 0, "text": part.text, "finish_reason": None}]})
    role = {"role": "assistant"} if script.role_first and not part.tokens else {}
    return event({"choices": [{"index": 0, "delta": {**role, "content": part.text}, "finish_reason": None}]})


def ending(script: Script) -> bytes:
    """The bytes after the last part."""
    if script.ending == "error":
        return event({"error": {"message": "as the script wants it", "type": "server_error"}})
    if script.ending == "cut":
        return b""
    usage = {"prompt_tokens": 8, "completion_tokens": script.tokens}
    return event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
