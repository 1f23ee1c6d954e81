from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmsched.engine.text.parsers.output_parser import SPACE, MalformedCallError, OutputParser, Steps

_ENDS = ("\n</parameter>", "</parameter>")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderParser(OutputParser):
    """Parser of <tool_call><function=f><parameter=x>1</parameter></function></tool_call>, Qwen3-Coder's notation.

    The types in a function's schema say which values are texts. Texts are emitted as they arrive, other values when
    they are complete.
    """

    markers = ("<tool_call>", "</tool_call>", "<function=", "</function>", "</parameter>")

    def read(self) -> Steps:
        while start := (yield from self.until(("<tool_call>", "<function="), self.content)):
            yield from self.attempt(self._calls(is_wrapped=start == "<tool_call>"))

    def _calls(self, *, is_wrapped: bool) -> Steps:
        if is_wrapped:
            yield from self.skip_space()
            yield from self.expect("<function=")
        yield from self._call()
        yield from self.skip_space()
        if is_wrapped and self.char:
            yield from self.expect("</tool_call>")

    def _call(self) -> Steps:
        name = yield from self.word(lambda char: char not in "<>" + SPACE)
        yield from self.expect(">")
        self.begin_call(name)
        properties = self._functions[name].get("properties")
        is_first = True
        yield from self._tag()
        while self.char != "/":
            yield from self.expect("parameter=")
            key = yield from self.word(lambda char: char not in "<>")
            yield from self.expect(">")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            self.arguments(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._argument(_types(schema))
            yield from self._tag()
            is_first = False
        yield from self.expect("/function>")
        self.arguments("{}" if is_first else "}")
        self.end_arguments()

    def _tag(self) -> Steps:
        yield from self.skip_space()
        yield from self.expect("<")

    def _argument(self, types: set[str]) -> Steps:
        if self.char == "\n":
            yield from self.take()
        if types <= {"string"}:
            self.arguments('"')
            if not (yield from self.until(_ENDS, lambda text: self.arguments(_json_string(text)[1:-1]))):
                raise MalformedCallError
            self.arguments('"')
            return
        chars: list[str] = []
        is_complete = yield from self.until(_ENDS, chars.append)
        text = "".join(chars)
        self.arguments(_json_value(text, types) if is_complete else text)
        if not is_complete:
            raise MalformedCallError


def _types(schema: Any) -> set[str]:
    """Return the types that a JSON schema names; an empty set for a schema without types."""
    if not isinstance(schema, Mapping):
        return set()
    own = schema.get("type")
    types = {own} if isinstance(own, str) else {str(each) for each in own} if isinstance(own, list) else set()
    unions = [each for key in ("anyOf", "oneOf") if isinstance(each := schema.get(key), list)]
    return types.union(*(_types(member) for members in unions for member in members))


def _json_value(text: str, types: set[str]) -> str:
    """Return the value that `text` stands for as JSON."""
    value = _PYTHON_WORDS.get(text, text)
    if "string" in types and not (value == "null" and "null" in types):
        return _json_string(text)
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _json_string(text)
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
