"""Incremental parsers of a model's output, which may have reasoning, content and tool calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from llmsched.engine.text.parsers.parts import Kind, Part, Parts

#: Steps of a parser: a generator that stops at every `yield` until it gets the next character.
Steps = Generator[None, str, None]
Emit = Callable[[str], None]

#: Functions of a request: JSON schemas of their parameters, by name.
Functions = Mapping[str, Mapping[str, Any]]

SPACE = " \t\r\n"


class MalformedCallError(Exception):
    """Error that ends the reading of a call."""


class OutputParser:
    """Parser of one output. The text may arrive in pieces of any size: the joined parts are the same.

    `thinking` has the texts that begin and end reasoning, and `opened` says that the prompt ends within reasoning.

    This class finds no calls. In a subclass, `read` reads the output after the reasoning, character by character.
    Text that looks like a call but is malformed, or calls a function that is not in `functions`, is content. If a call
    turns out to be malformed after its arguments have begun, the rest is content. White space beside reasoning and
    calls is dropped.
    """

    #: Texts of the notation. If they are special tokens, the output must show them.
    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, functions: Functions, thinking: tuple[str, str] | None = None, *, opened: bool = False) -> None:
        self.char = ""  # the next character; "" at the end of the output
        self.is_plain = False  # whatever follows is content
        self.has_reasoning = False
        self._functions = functions
        self._again: deque[str] = deque()  # characters to read again
        self._read: list[str] = []  # texts that were read since the last part or the beginning of a call
        self._parts = Parts()
        self._num_calls = 0
        self._steps = self._run(thinking, opened)
        next(self._steps)

    @property
    def in_arguments(self) -> bool:
        """True if the output so far ends within the arguments of a call."""
        return self._parts.kind is Kind.ARGUMENTS

    def push(self, text: str) -> list[Part]:
        """Add text. Return the parts that are certain."""
        if self.is_plain:
            return [Part(Kind.CONTENT, text)] if text else []
        for char in text:
            self._feed(char)
        return self._parts.take()

    def finish(self) -> list[Part]:
        """Return the parts that `push(...)` still holds back at the end of the output."""
        with suppress(StopIteration):
            self._feed("")
        self._parts.end()
        return self._parts.take()

    def _feed(self, char: str) -> None:
        self._steps.send(char)
        while self._again:
            self._steps.send(self._again.popleft())

    def _run(self, thinking: tuple[str, str] | None, opened: bool) -> Steps:
        self.char = yield
        if thinking is not None:
            yield from self._read_reasoning(*thinking, opened)
        yield from self.read()

    def _read_reasoning(self, start: str, end: str, opened: bool) -> Steps:
        if not opened:
            with suppress(MalformedCallError):
                yield from self.skip_space()
                yield from self.expect(start)
                opened = True
        self.has_reasoning = opened
        if opened:
            self._parts.begin(Kind.REASONING)
            yield from self.until((end,), self.reasoning)
            self._parts.begin(Kind.CONTENT)
            self._read.clear()
        else:
            self._unread()

    def read(self) -> Steps:
        """Read the output after the reasoning, up to its end."""
        if self._parts.at_edge:
            yield from self.skip_space()
        self.is_plain = True
        while self.char:
            self._parts.add(Kind.CONTENT, self.char)
            self.char = yield

    # -- reading, for subclasses ------------------------------------------------------------------------------

    def take(self, emit: Emit | None = None) -> Steps:
        """Read the next character, and pass it to `emit`."""
        self._read.append(self.char)
        if emit is not None:
            emit(self.char)
        self.char = yield

    def skip_space(self, emit: Emit | None = None) -> Steps:
        while self.char and self.char in SPACE:
            yield from self.take(emit)

    def expect(self, text: str, emit: Emit | None = None) -> Steps:
        """Read `text`. Raises MalformedCallError if something else follows."""
        for char in text:
            if self.char != char:
                raise MalformedCallError
            yield from self.take(emit)

    def word(self, is_part: Callable[[str], bool], most: int = 256) -> Generator[None, str, str]:
        """Read and return the next characters that satisfy `is_part`, at most `most`, else raise MalformedCallError."""
        chars: list[str] = []
        while self.char and is_part(self.char):
            chars.append(self.char)
            if len(chars) > most:
                raise MalformedCallError
            yield from self.take()
        return "".join(chars)

    def until(self, ends: tuple[str, ...], emit: Emit) -> Generator[None, str, str]:
        """Pass the text before the first of `ends` to `emit`, and read that end.

        Returns the end, or "" at the end of the output. Text that may become an end is held back.
        """
        held = ""
        beginnings = {end[0] for end in ends}
        while self.char:
            if not held and self.char not in beginnings:
                emit(self.char)
                self.char = yield
                continue
            held += self.char
            while held and not any(end.startswith(held) for end in ends):
                emit(held[0])
                held = held[1:]
            self.char = yield
            if held in ends:
                self._read.append(held)
                return held
        for char in held:
            emit(char)
        return ""

    def attempt(self, call: Steps) -> Steps:
        """Read one or several calls. Malformed text becomes content, or is read again to look for other calls."""
        num_calls = self._num_calls
        try:
            yield from call
        except MalformedCallError:
            if not self.char and self._parts.kind is Kind.ARGUMENTS:  # truncated, for example by max_tokens
                self.arguments("".join(self._read))
            else:
                if self._num_calls == num_calls and self._read:
                    self.content(self._read.pop(0))
                self._unread()
        self._read.clear()

    def _unread(self) -> None:
        """Go back, so that the characters in `_read` are read again."""
        self.char, *later = (*"".join(self._read), self.char)
        self._again.extendleft(reversed(later))
        self._read.clear()

    # -- parts, for subclasses --------------------------------------------------------------------------------

    def reasoning(self, text: str) -> None:
        self._parts.add_text(Kind.REASONING, text)

    def content(self, text: str) -> None:
        self._parts.add_text(Kind.CONTENT, text)

    def begin_call(self, name: str) -> None:
        """Begin a call. Raises MalformedCallError if the request does not declare this function."""
        if name not in self._functions:
            raise MalformedCallError
        self._parts.begin_call(name)
        self._num_calls += 1
        self._read.clear()

    def arguments(self, text: str) -> None:
        self._parts.begin(Kind.ARGUMENTS)
        self._parts.add(Kind.ARGUMENTS, text)
        self._read.clear()

    def end_arguments(self) -> None:
        self._parts.begin(Kind.CALL)
