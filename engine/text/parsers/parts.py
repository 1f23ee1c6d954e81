"""Parts of a model's output."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # the name of a function: a call begins
    ARGUMENTS = "arguments"  # piece of the arguments of the latest call, which are a JSON object


class Part(NamedTuple):
    """Piece of an output. Adjacent pieces of one kind form one text; each CALL begins a new call."""

    kind: Kind
    text: str


class Parts:
    """Parts of an output that a parser has found. White space beside reasoning and calls is dropped."""

    def __init__(self) -> None:
        self.kind: Kind | None = None  # of the latest part
        self.at_edge = False  # white space that follows is dropped
        self._parts: list[tuple[Kind, list[str]]] = []
        self._space: list[str] = []  # white space that is dropped unless text of the same kind follows

    def add_text(self, kind: Kind, text: str) -> None:
        """Add white space, or text that neither begins nor ends with white space."""
        if kind is not self.kind:
            self.begin(kind)
        if text.isspace():
            self._space.append(text)
            return
        if self._space:
            if not self.at_edge:
                self.add(kind, "".join(self._space))
            self._space.clear()
        self.at_edge = False
        self.add(kind, text)

    def begin(self, kind: Kind) -> None:
        """Begin a part of this kind."""
        if kind is not self.kind:
            self.at_edge = self.kind is not None or kind is not Kind.CONTENT
            self.kind = kind
            self._space.clear()

    def begin_call(self, name: str) -> None:
        self.begin(Kind.CALL)
        self._parts.append((Kind.CALL, [name]))

    def add(self, kind: Kind, text: str) -> None:
        """Add text to the latest part if it has the same kind, else as a part of its own."""
        if self._parts and self._parts[-1][0] is kind:
            self._parts[-1][1].append(text)
        elif text:
            self._parts.append((kind, [text]))

    def end(self) -> None:
        """Add the white space at the end of the output."""
        if not self.at_edge:
            self.add(self.kind or Kind.CONTENT, "".join(self._space))

    def take(self) -> list[Part]:
        """Return the parts since the last call."""
        parts = [Part(kind, "".join(texts)) for kind, texts in self._parts]
        self._parts.clear()
        return parts
