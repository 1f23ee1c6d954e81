"""How long work reports itself without knowing who draws it."""

from __future__ import annotations

from collections.abc import Callable

#: Called with (what is being done, units done, units in all); total 0 means unknown.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """The progress of someone who does not want to know."""
