from __future__ import annotations

import ast
import json
import warnings

from llmsched.engine.text.parsers.output_parser import MalformedCallError, OutputParser, Steps


class PythonicParser(OutputParser):
    """Parser of [f(x=1), g()], the notation of Llama 4: calls begin the output or follow a marker.

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


def _arguments(brackets: str) -> str:
    """Return the keyword arguments of a Python call as a JSON object. Raises MalformedCallError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            call = ast.parse(f"f{brackets}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise MalformedCallError
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MalformedCallError from None
