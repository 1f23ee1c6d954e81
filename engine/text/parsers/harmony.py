from __future__ import annotations

import re
from collections.abc import Generator

from llmsched.engine.text.parsers.output_parser import OutputParser, Steps
from llmsched.engine.text.parsers.parts import Kind

_STARTS = ("<|channel|>", "<|start|>", " to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_FUNCTION = re.compile(r"(?:^| )to=functions\.([^\s<]+)")


class HarmonyParser(OutputParser):
    """Parser of harmony, the notation of gpt-oss: messages with a channel and, if they are calls, a recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>
    """

    markers = (*_STARTS[:2], "<|message|>", "<|constrain|>", *_ENDS)

    def read(self) -> Steps:
        start = yield from self.until(_STARTS, self.content)
        while start:
            head = [start]
            if not (yield from self.until(("<|message|>",), head.append)):
                self.content("".join(head))
                return
            start = yield from self._message("".join(head))
            if start != "<|start|>":
                start = yield from self.until(_STARTS, self.content)

    def _message(self, head: str) -> Generator[None, str, str]:
        """Read the body of a message, and return its end."""
        function = _FUNCTION.search(head)
        if function and function[1] in self._functions:
            self.begin_call(function[1])
            end = yield from self.until(_ENDS, self.arguments)
            self.end_arguments()
            return end
        if function:  # the request does not declare it
            self.content(f"{head}<|message|>")
        elif "<|channel|>analysis" in head:
            return (yield from self.until(_ENDS, self.reasoning))
        elif self._parts.kind is Kind.CONTENT:
            self.content("\n\n")
        return (yield from self.until(_ENDS, self.content))
