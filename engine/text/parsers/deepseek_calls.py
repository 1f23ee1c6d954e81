from __future__ import annotations

from typing import ClassVar

from llmsched.engine.text.parsers.json_calls import JsonParser
from llmsched.engine.text.parsers.output_parser import SPACE, MalformedCallError, Steps


def _mark(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"  # with full-width bars


_CALLS_BEGIN, _CALLS_END = _mark("tool▁calls▁begin"), _mark("tool▁calls▁end")
_CALL_BEGIN, _CALL_END = _mark("tool▁call▁begin"), _mark("tool▁call▁end")
_SEPARATOR = _mark("tool▁sep")
#: What _CALL_BEGIN and _CALLS_END have in common.
_CALL = _CALL_BEGIN.removesuffix("▁begin\uff5c>")


class DeepSeekV31Parser(JsonParser):
    """Parser of the notation of DeepSeek V3.1: calls with marks around each and around all of them.

    Between the name of a function and its arguments there is another mark.
    """

    markers = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _SEPARATOR, _CALL_END)
    #: What stands before the name of a function, between the name and the arguments, and after the arguments. A parser
    #: ignores white space at the ends of these texts.
    begin: ClassVar[tuple[str, ...]] = (_CALL_BEGIN,)
    middle: ClassVar[tuple[str, ...]] = (_SEPARATOR,)
    end: ClassVar[tuple[str, ...]] = (_CALL_END,)

    def read(self) -> Steps:
        while (yield from self.until(self.markers[:1], self.content)):
            yield from self.attempt(self._calls())

    def _calls(self) -> Steps:
        yield from self.skip_space()
        yield from self.expect(_CALL)
        while self.char == _CALL_BEGIN[len(_CALL)]:
            yield from self._call()
            if not self.char:
                return
            yield from self.expect(_CALL)
        yield from self.expect(_CALLS_END.removeprefix(_CALL))

    def _call(self) -> Steps:
        yield from self.expect("".join(self.begin).removeprefix(_CALL))
        name = yield from self.word(lambda char: char not in "<" + SPACE)
        yield from self._texts(self.middle)
        if self.char != "{":
            raise MalformedCallError
        self.begin_call(name)
        yield from self.json_value(self.arguments)
        self.end_arguments()
        yield from self._texts(self.end)
        self._read.clear()

    def _texts(self, texts: tuple[str, ...]) -> Steps:
        for text in texts:
            yield from self.skip_space()
            if self.char:  # some models leave the end out
                yield from self.expect(text.strip())
        yield from self.skip_space()


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Parser of the notation of DeepSeek V3 and R1, whose calls have the type "function" and a block of JSON."""

    begin = (_CALL_BEGIN, "function", _SEPARATOR)
    middle = ("\n```json\n",)
    end = ("\n```", _CALL_END)
