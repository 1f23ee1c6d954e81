"""Terminal output: tables, bars, progress, units and JSON, in plain text if the stream is not a terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from itertools import accumulate
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from llmsched.cli.chart import MARKS, PLAIN_MARKS, Chart, draw
from llmsched.cli.progress_display import LogProgress, shown
from llmsched.engine.progress import Progress
from llmsched.engine.units import human_bytes as human_bytes
from llmsched.engine.units import human_seconds as human_seconds

if TYPE_CHECKING:
    from rich.console import Console

#: Control characters, escaped because names and texts may come from untrusted files.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}

#: Width of tables in a file or pipe, where nothing may be cut off.
_PLAIN_WIDTH = 200
_PALETTE = ("cyan", "yellow", "magenta", "green", "blue", "red")


def stdout() -> Console:
    """Return the console for results."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def stderr() -> Console:
    """Return the console for notes, errors and progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PLAIN_WIDTH)


def say(text: str = "") -> None:
    """Print a line of the result, without interpreting markup."""
    stdout().print(_literal(text), markup=False, soft_wrap=True)


def write(text: str) -> None:
    """Print a part of a line of the result at once."""
    stdout().print(_literal(text), markup=False, soft_wrap=True, end="")


def note(text: str) -> None:
    """Print a note on stderr, such as a choice that was made for the user."""
    _tell(f"note: {text}", "dim")


def warn(text: str) -> None:
    """Print a warning on stderr."""
    _tell(f"warning: {text}", "yellow")


def error(text: str) -> None:
    """Print an error on stderr, in one line."""
    _tell(f"error: {' '.join(text.split())}", "bold red")


def _tell(text: str, style: str) -> None:
    """Print a line on stderr. Drop it if stderr cannot be written: what is told there must not end a command."""
    try:
        stderr().print(_literal(text), markup=False, style=style, soft_wrap=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Discard all output to a stream that failed, including text that the interpreter would write again at exit."""
    with suppress(OSError):  # the stream has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _literal(text: str) -> str:
    return text.translate(_CONTROL)


def show_log() -> None:
    """Write the engine's log messages to stderr from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("llmsched")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> None:
    """Print a table. The first `text_columns` columns are aligned left, the others right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = stdout()
    look = box.SIMPLE_HEAD if console.is_terminal else None
    wide = sum(max(len(cell) for cell in cells) + 2 for cells in zip(columns, *rows, strict=True))
    narrow = wide > console.width  # then break the column names at spaces, not within words
    drawn = Table(
        box=look,
        pad_edge=False,
        collapse_padding=console.is_terminal,
        header_style="bold",
        show_header=any(columns),
    )
    for index, column in enumerate(columns):
        shown = column.replace(" ", "\n") if narrow else column
        drawn.add_column(Text(shown), justify="left" if index < text_columns else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(_literal(cell)) for cell in row))
    # Rich would wrap the table's own title at the table's width.
    console.print(Text(title, style="italic"), soft_wrap=True)
    console.print(drawn)


def chart(drawn: Chart) -> None:
    """Draw a chart with characters, at most as wide as the terminal."""
    console = stdout()
    width, marks = (min(100, console.width - 12), MARKS) if console.is_terminal else (72, None)
    for line in draw(drawn, width=max(20, width), marks=marks or PLAIN_MARKS):
        console.print(line, markup=False, soft_wrap=True)


def stacked_bar(parts: Sequence[tuple[str, int]], total: int, *, width: int = 60) -> None:
    """Draw labelled byte counts as shares of `total` bytes in one bar, with a legend. The rest of the bar is dots."""
    from rich.text import Text

    console = stdout()
    sums = accumulate(count for _, count in parts)
    ends = [min(width, round(width * done / total)) if total else 0 for done in sums]
    bar, legend, start = Text(), Text(), 0
    for index, ((label, count), end) in enumerate(zip(parts, ends, strict=True)):
        letter, colour = label[0].upper(), _PALETTE[index % len(_PALETTE)]
        bar.append(("█" if console.is_terminal else letter) * (end - start), style=colour)
        legend.append("  " if index else "")
        legend.append("■ " if console.is_terminal else f"{letter} ", style=colour)
        legend.append(f"{label} {human_bytes(count)}")
        start = end
    bar.append("·" * (width - start))
    console.print(Text("[") + bar + Text(f"] {human_bytes(total)}"))
    console.print(legend)


def emit_json(value: Any) -> None:
    """Write one JSON document to stdout. Raises ValueError for a NaN or infinite number."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False, default=_plain) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a Progress callback that shows bars on a terminal, or else writes an occasional line to stderr."""
    if sys.stderr.isatty():
        with _bars() as bars, shown(bars):
            yield bars
        return
    log = LogProgress()
    with shown(log):
        yield log
    log.done()


def _bars() -> Any:
    """Return a Display with a bar per stage. The detail has its own line, because 80 columns cannot hold both."""
    from rich import progress
    from rich.console import RenderableType
    from rich.text import Text

    class Bars(progress.Progress):
        def __init__(self) -> None:
            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
            )
            self._stages: dict[str, progress.TaskID] = {}
            self._detail = ""
            super().__init__(*columns, console=stderr(), transient=True)

        def __call__(self, stage: str, done: int, total: int) -> None:
            if stage not in self._stages:
                self._stages[stage] = self.add_task(stage, total=total or None)
            self.update(self._stages[stage], completed=done, total=total or None)

        def detail(self, text: str) -> None:
            self._detail = text

        def get_renderables(self) -> Iterator[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self._detail:
                yield Text(f"  {self._detail}", no_wrap=True, overflow="ellipsis")

    return Bars()
