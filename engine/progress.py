"""Progress reports of long-running work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

#: Called with the stage, the units done and the units in total (0: unknown).
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None: ...


def with_remark(progress: Progress, remark: str) -> Progress:
    """Return a Progress callback that adds `remark`, in parentheses, to the name of each stage."""
    return lambda stage, done, total: progress(f"{stage} ({remark})", done, total)


def tracked(items: Sequence[Item], stage: str, progress: Progress) -> Iterator[Item]:
    """Yield `items`, and report the progress before each item and at the end."""
    for done, item in enumerate(items):
        progress(stage, done, len(items))
        yield item
    progress(stage, len(items), len(items))
