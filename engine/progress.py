"""Progress callback: how long-running work reports to whatever displays it."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the stage, the units done and the units in total (0: unknown).
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore all progress."""
