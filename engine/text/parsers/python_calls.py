from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from llmsched.engine.text.parsers.output_parser import MalformedCallError, OutputParser, Steps


class PythonicParser(OutputParser):
    """Parser of [f(x=1), g(**{"y z": 2})], the notation of Llama 4: calls begin the output or follow a marker.

    A call is emitted when it is complete.
    """

    markers = ("<|python_start|>", "<|python_end|>")

    def read(self) -> Steps:
        yield from self.skip_space()
        if self.char == "[":
            yield from self.attempt(self._calls())
        else:
            self._unread()
        while (yield from self.until(self.markers[:1], self.content)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps:
        yield from self.skip_space()
        yield from self.expect("[")
        yield from self._call()
        while self.char != "]":
            yield from self.expect(",")
            yield from self._call()
        yield from self.take()
        self._read.clear()
        yield from self.skip_space()
        if self.char == "<":
            yield from self.expect(self.markers[1])

    def _call(self) -> Steps:
        """Read a call, and the white space around it."""
        yield from self.skip_space()
        name = yield from self.word(lambda char: char.isalnum() or char in "_-.:/")
        if name not in self._functions:
            raise MalformedCallError
        chars: list[str] = []
        yield from self._bracketed(chars)
        arguments = _arguments("".join(chars))
        self.begin_call(name)
        self.arguments(arguments)
        self.end_arguments()
        yield from self.skip_space()

    def _bracketed(self, chars: list[str]) -> Steps:
        """Add an opening bracket and all up to the bracket that closes it to `chars`."""
        depth, quote, marker = 0, "", list(self.markers[0])
        emit = chars.append
        yield from self.expect("(", emit)
        while quote or depth or self.char != ")":
            # After a marker, reading begins anew. Else a text with many markers would be read as many times.
            if not self.char or (chars[-1] == marker[-1] and chars[-len(marker) :] == marker):
                raise MalformedCallError
            if quote:
                if self.char == "\\":
                    yield from self.take(emit)
                elif self.char == quote:
                    quote = ""
            elif self.char in "\"'":
                quote = self.char
            elif self.char in "([{":
                depth += 1
            elif self.char in ")]}":
                depth -= 1
            yield from self.take(emit)
        yield from self.take(emit)


class _JsonWords(ast.NodeTransformer):
    """Reader of JSON's words for values, which models write for Python's."""

    _VALUES: ClassVar[Mapping[str, Any]] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def _arguments(brackets: str) -> str:
    """Return the keyword arguments of a Python call as a JSON object. Raises MalformedCallError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            call = ast.parse(f"f{brackets}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedCallError
        values: dict[str, Any] = {}
        for keyword in call.keywords:
            value = ast.literal_eval(_JsonWords().visit(keyword.value))
            if keyword.arg is not None:
                values[keyword.arg] = value
            elif isinstance(value, dict):
                values |= value
            else:
                raise MalformedCallError
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedCallError from None
