"""Parsers of tool calls that are written as JSON: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Generator

from llmsched.engine.text.parsers.output_parser import SPACE, Emit, MalformedCallError, OutputParser, Steps

_MAX_DEPTH = 128
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SCALAR_LENGTH = 1024


class JsonParser(OutputParser):
    """Base class of parsers whose calls have JSON arguments."""

    def json_value(self, emit: Emit, depth: int = 0) -> Steps:
        """Read a JSON value and pass its valid part to `emit`.

        Raises MalformedCallError at the first invalid character.
        """
        if self.char == '"':
            yield from self._json_string(emit)
        elif self.char in ("{", "["):
            if depth == _MAX_DEPTH:
                raise MalformedCallError
            yield from self._json_items(emit, depth)
        else:
            scalar = yield from self.word(lambda char: char.isalnum() or char in "+-.", _SCALAR_LENGTH)
            if not _SCALAR.fullmatch(scalar):
                raise MalformedCallError
            emit(scalar)

    def _json_items(self, emit: Emit, depth: int) -> Steps:
        is_object = self.char == "{"
        end = "}" if is_object else "]"
        yield from self.take(emit)
        yield from self.skip_space(emit)
        while self.char != end:
            if is_object:
                yield from self._json_string(emit)
                yield from self._punctuation(":", emit)
            yield from self.json_value(emit, depth + 1)
            yield from self.skip_space(emit)
            if self.char != end:
                yield from self._punctuation(",", emit)
                if self.char == end:
                    raise MalformedCallError
        yield from self.take(emit)

    def _json_string(self, emit: Emit) -> Steps:
        yield from self.expect('"', emit)
        while self.char != '"':
            if self.char == "\\":
                emit((yield from self._escape()))
            elif not self.char:
                raise MalformedCallError
            elif self.char < " ":  # models write line breaks as they are
                emit(json.dumps(self.char)[1:-1])
                yield from self.take()
            else:
                yield from self.take(emit)
        yield from self.take(emit)

    def _escape(self) -> Generator[None, str, str]:
        yield from self.take()
        escape = self.char
        if not escape or escape not in '"\\/bfnrtu':
            raise MalformedCallError
        yield from self.take()
        if escape == "u":
            for _ in range(4):
                if self.char not in _HEX_DIGITS:
                    raise MalformedCallError
                escape += self.char
                yield from self.take()
        return f"\\{escape}"

    def _punctuation(self, mark: str, emit: Emit | None = None) -> Steps:
        """Read `mark`, which white space may surround."""
        yield from self.skip_space(emit)
        yield from self.expect(mark, emit)
        yield from self.skip_space(emit)

    def json_calls(self) -> Steps:
        """Read a call, or a list of calls."""
        yield from self.skip_space()
        if self.char == "[":
            yield from self.take()
            yield from self.json_call()
            while self.char != "]":
                yield from self._punctuation(",")
                yield from self.json_call()
            yield from self.take()
            self._read.clear()
        else:
            yield from self.json_call()

    def json_call(self) -> Steps:
        """Read {"name": "f", "arguments": {"x": 1}} and white space. The arguments may be called parameters."""
        name: str | None = None
        arguments: str | None = None
        begun = False
        yield from self._punctuation("{")
        while True:
            key = yield from self._text_value()
            yield from self._punctuation(":")
            if key == "name" and name is None:
                name = yield from self._text_value()
                if name not in self._functions:
                    raise MalformedCallError
            elif key in ("arguments", "parameters") and arguments is None:
                if begun := name is not None and self.char == "{":
                    assert name is not None
                    self.begin_call(name)
                    yield from self.json_value(self.arguments)
                    self.end_arguments()
                    arguments = ""
                else:
                    arguments = yield from self._value()
            elif key in ("id", "type"):
                yield from self._value()
            else:
                raise MalformedCallError
            yield from self.skip_space()
            if self.char == "}":
                break
            yield from self._punctuation(",")
        if not begun:
            self._whole_call(name, arguments)
        yield from self.take()
        self._read.clear()
        yield from self.skip_space()

    def _whole_call(self, name: str | None, arguments: str | None) -> None:
        """Add a call whose arguments come before its name, are missing, or are JSON text within a string."""
        value = json.loads(arguments or "{}")
        if isinstance(value, str):
            try:
                arguments, value = value, json.loads(value)
            except (ValueError, RecursionError):
                raise MalformedCallError from None
        if name is None or not isinstance(value, dict | None):
            raise MalformedCallError
        self.begin_call(name)
        self.arguments(arguments if value and arguments else "{}")
        self.end_arguments()

    def _text_value(self) -> Generator[None, str, str]:
        chars: list[str] = []
        yield from self._json_string(chars.append)
        return str(json.loads("".join(chars)))

    def _value(self) -> Generator[None, str, str]:
        chars: list[str] = []
        yield from self.json_value(chars.append)
        return "".join(chars)


class HermesParser(JsonParser):
    """Parser of <tool_call>{"name": "f", "arguments": {}}</tool_call>, the notation of Hermes and Qwen."""

    markers = ("<tool_call>", "</tool_call>")

    def read(self) -> Steps:
        while (yield from self.until(self.markers[:1], self.content)):
            yield from self.attempt(self._call())

    def _call(self) -> Steps:
        yield from self.json_calls()
        yield from self.skip_space()  # after a list
        if self.char:  # some models leave the end out
            yield from self.expect(self.markers[1])


class Llama3JsonParser(JsonParser):
    """Parser of {"name": "f", "parameters": {}}, the notation of Llama 3: calls begin the output or follow a marker."""

    markers = ("<|python_tag|>",)

    def read(self) -> Steps:
        yield from self.skip_space()
        if self.char == "{":
            yield from self.attempt(self._calls())
        else:
            self._unread()
        while (yield from self.until(self.markers, self.content)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps:
        yield from self.json_calls()
        while self.char == ";":
            yield from self.take()
            yield from self.json_calls()


class MistralParser(JsonParser):
    """Parser of Mistral's notations: [TOOL_CALLS][{"name": "f", "arguments": {}}] and [TOOL_CALLS]f[ARGS]{}."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def read(self) -> Steps:
        while (yield from self.until(self.markers[:1], self.content)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps:
        yield from self.skip_space()
        if self.char in ("[", "{"):
            yield from self.json_calls()
            return
        name = yield from self.word(lambda char: char not in "[{" + SPACE)
        yield from self.skip_space()
        if self.char == "[":
            yield from self.take()
            if self.char == "C":
                yield from self.expect(self.markers[1][1:])
                yield from self.word(str.isalnum)
                yield from self.expect("[")
            yield from self.expect(self.markers[2][1:])
            yield from self.skip_space()
        if self.char != "{":
            raise MalformedCallError
        self.begin_call(name)
        yield from self.json_value(self.arguments)
        self.end_arguments()
