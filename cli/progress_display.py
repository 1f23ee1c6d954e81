from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

#: Seconds before the first line in a log, and the shortest time between two lines.
QUIET_S = 1.0
EVERY_S = 10.0


class Display(Protocol):
    """Progress callback that can also show a `detail` text."""

    def __call__(self, stage: str, done: int, total: int) -> None: ...
    def detail(self, text: str) -> None: ...


class LogProgress:
    """Progress in a log: at most one line per EVERY_S seconds, and no line for work shorter than QUIET_S seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic, say: Callable[[str], None] | None = None) -> None:
        self._now = now
        self._write = say or _print
        self._start = now()
        self._next = self._start + QUIET_S
        self._told = False
        self._detail = ""
        self._latest: tuple[str, int, int] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._latest = stage, done, total
        self.tell()

    def tell(self) -> None:
        """Write a line about the latest stage if one is due."""
        if self._latest is None or self._now() < self._next:
            return
        stage, done, total = self._latest
        percent = 100 * done // total if total else 0
        self._say(f"{stage} ...{f' {percent} %' if percent else ''}{self._detail}")
        self._next = self._now() + EVERY_S
        self._detail = ""

    def detail(self, text: str) -> None:
        self._detail = f" ({text})"

    def done(self) -> None:
        """Report that the work succeeded, if earlier lines have reported its progress."""
        if self._told:
            self._say(f"done after {self._now() - self._start:.1f} s")

    def _say(self, line: str) -> None:
        self._write(line)
        self._told = True


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def repeated(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `action` in another thread every `every_s` seconds while the block runs."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


#: Displays of the work in progress, innermost last.
_displays: list[Display] = []


def detail(text: str) -> None:
    """Show `text` in the progress display, if there is one."""
    if _displays:
        _displays[-1].detail(text)


@contextmanager
def shown(display: Display) -> Iterator[None]:
    """While the block runs, let `display` show each text that is passed to this module's `detail(...)`."""
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)
