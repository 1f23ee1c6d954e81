from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from llmsched.engine.text.parsers.output_parser import OutputParser
from llmsched.engine.text.parsers.parts import Kind, Part


@dataclass(slots=True)
class CallDelta:
    """Part of a tool call. The first one of a call has its id and name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def body(self, whole: bool) -> dict[str, Any]:
        """Return the JSON of a call or, if `whole` is False, of its part in a chunk of a stream."""
        body: dict[str, Any] = {} if whole else {"index": self.index}
        if self.id is None:
            return {**body, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {**body, "id": self.id, "type": "function", "function": function}


class ParsedOutput:
    """Output of one choice, divided into reasoning, content and calls. It drops calls after the first `most_calls`.

    `reasoning_end` is the id of the token that ends reasoning.
    """

    def __init__(self, parser: OutputParser, most_calls: int | None, reasoning_end: int | None) -> None:
        self._parser = parser
        self._most_calls = most_calls
        self._reasoning_end = reasoning_end
        self._num_tokens = 0  # up to `reasoning_end`
        self._has_ended = False
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        return self._num_tokens if self._parser.has_reasoning else 0

    def count(self, token_ids: list[int]) -> None:
        """Count the tokens of reasoning, including the token that ends it."""
        if self._has_ended:
            return
        if (end := self._reasoning_end) is not None and end in token_ids:
            self._has_ended = True
            token_ids = token_ids[: token_ids.index(end) + 1]
        self._num_tokens += len(token_ids)

    @property
    def is_plain(self) -> bool:
        """True if all further text is content."""
        return self._parser.is_plain

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and the output does not end within the arguments of one."""
        return self.num_calls > 0 and not self._parser.in_arguments

    def divide(self, text: str, is_last: bool) -> list[Part | CallDelta]:
        """Return the reasoning, the content and the parts of calls that `text` adds, in their order."""
        parts = self._parser.push(text)
        if is_last:
            parts += self._parser.finish()
        found: list[Part | CallDelta] = []
        for part in parts:
            if part.kind in (Kind.REASONING, Kind.CONTENT):
                found.append(part)
                continue
            if part.kind is Kind.CALL:
                self.num_calls += 1
            if self._most_calls is not None and self.num_calls > self._most_calls:
                continue
            if part.kind is Kind.CALL:
                found.append(CallDelta(self.num_calls - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=part.text))
            elif found and isinstance(call := found[-1], CallDelta):
                call.arguments += part.text
            else:
                found.append(CallDelta(self.num_calls - 1, part.text))
        return found
