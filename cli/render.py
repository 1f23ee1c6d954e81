"""Terminal output: tables, progress, units and JSON, in plain text if the stream is not a terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from llmsched.cli.chart import Chart, draw
from llmsched.cli.log_lines import JsonLines, StderrHandler, TextLines
from llmsched.cli.progress_display import QUIET_S, LogProgress, repeated, shown
from llmsched.engine.progress import Progress
from llmsched.engine.units import human_bytes as human_bytes
from llmsched.engine.units import human_seconds as human_seconds

if TYPE_CHECKING:
    from rich.console import Console

_logger = logging.getLogger("llmsched")
#: True if notes and warnings are written as lines of the log.
_notes_are_logged = False

#: Control characters, escaped because names and texts may come from untrusted files.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}

#: Width in a file or pipe, where no line is broken.
_PLAIN_WIDTH = 10_000
#: A text with at most this many characters is not wrapped in a table.
_SHORT_LABEL = 16
#: Bars shown at a time, the latest stages.
_MOST_BARS = 3

#: Consoles that receive what would go to stdout, innermost last.
_redirected: list[Console] = []

#: Indentation and label at the start of a line, such as "KV memory  ". Further lines begin below the text after it.
_LABEL = re.compile(r" *(?:\S{2,}(?: \S+)?? {2,})?")


def stdout() -> Console:
    from rich.console import Console

    if _redirected:
        return _redirected[-1]
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PLAIN_WIDTH)


def say(text: str = "", *, wrap: bool = True) -> None:
    """Print a line on stdout, without interpreting markup. Set `wrap` to False for text that users will copy."""
    console = stdout()
    console.print(_wrapped(text, console) if wrap else _literal(text), markup=False, soft_wrap=True)


def write(text: str) -> None:
    """Print text without a line break."""
    stdout().print(_literal(text), markup=False, soft_wrap=True, end="")


def note(text: str) -> None:
    _tell("note", text, "dim", logging.INFO)


def warn(text: str) -> None:
    _tell("warning", text, "yellow", logging.WARNING)


def error(text: str) -> None:
    _tell("error", " ".join(text.split()), "bold red", logging.ERROR)


def _tell(kind: str, text: str, style: str, level: int) -> None:
    """Print a line on stderr, or drop it if stderr cannot be written."""
    if _notes_are_logged:
        _logger.log(level, "%s", text)
        return
    console, text = stderr(), f"{kind}: {text}"
    try:
        console.print(_wrapped(text, console), markup=False, style=style, soft_wrap=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    with suppress(OSError):  # the stream has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _literal(text: str) -> str:
    return text.translate(_CONTROL)


def _wrapped(text: str, console: Console) -> str:
    """Return the text with control characters escaped and, for a terminal, with line breaks between words."""
    lines = _literal(text).split("\n")
    if not console.is_terminal:
        return "\n".join(lines)
    fill = textwrap.TextWrapper(console.width, break_long_words=False, break_on_hyphens=False)
    for index, line in enumerate(lines):
        label = _LABEL.match(line)
        fill.subsequent_indent = " " * len(label[0]) if label and len(label[0]) < console.width // 2 else ""
        lines[index] = fill.fill(line)
    return "\n".join(lines)


def show_log(*, as_json: bool = False) -> None:
    """Write the log on stderr. With `as_json`, notes and warnings are lines of the log from now on."""
    global _notes_are_logged
    _notes_are_logged = as_json
    handler = StderrHandler()
    handler.setFormatter(JsonLines() if as_json else TextLines())
    for name in ("llmsched", "uvicorn", "opentelemetry"):
        logging.getLogger(name).addHandler(handler)
    _logger.setLevel(logging.INFO)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: int = 1,
    spare: Sequence[str] = (),
) -> None:
    """Print a table. The first `text_columns` columns are aligned left, the others right.

    If the terminal is too narrow, the table leaves out empty columns, then columns in `spare`, the last one first. If
    that is not enough, it prints each row as a list with a line per column.
    """
    console = stdout()
    # Rich would wrap the table's own title at the table's width.
    console.print(_wrapped(title, console), markup=False, style="italic", soft_wrap=True)
    rows = [[_literal(cell) for cell in row] for row in rows]
    shown = list(range(len(columns)))
    empty = [index for index in shown if not any(row[index] for row in rows)]
    dropped = [columns.index(name) for name in spare if name in columns] + empty
    while (widths := _widths(columns, rows, shown, text_columns, console.width)) is None and dropped:
        shown.remove(dropped.pop())
    if widths is None:
        _list_rows(columns, rows, text_columns)
        return
    _draw_table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows], widths, text_columns)
    if left_out := [name for index, name in enumerate(columns) if index not in (*shown, *empty)]:
        say(f"not shown at this width: {', '.join(left_out)}")


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int], text_columns: int, room: int
) -> list[int] | None:
    """Return widths with which the columns `shown` fit into `room`, or None if that would break words or figures."""

    def longest(texts: Sequence[str]) -> int:
        return max(map(len, texts), default=0)

    cells = [[row[index] for row in rows] for index in shown]
    whole = [longest([columns[index], *column]) for index, column in zip(shown, cells, strict=True)]
    room -= 2 * (len(shown) - 1)
    if sum(whole) <= room:
        return whole
    least = [
        longest([*columns[index].split(), *(part for cell in column for part in _parts(cell, index < text_columns))])
        for index, column in zip(shown, cells, strict=True)
    ]
    room -= sum(least)
    if room < 0:
        return None
    for place, index in enumerate(shown):
        if index < text_columns:
            more = min(room, whole[place] - least[place])
            least[place] += more
            room -= more
    return least


def _parts(cell: str, is_text: bool) -> list[str]:
    return cell.split() if is_text and len(cell) > _SHORT_LABEL else [cell]


def _draw_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], text_columns: int
) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout()
    drawn = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        drawn.add_column(Text(column), overflow="fold", width=width, vertical="top" if text_columns > 1 else "bottom")
        drawn.columns[index].justify = "left" if index < text_columns else "right"
    for row in rows:
        drawn.add_row(*map(Text, row))
    for segments in console.render_lines(drawn, pad=False):
        line = Text.assemble(*((part.text, part.style or "") for part in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def _list_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> None:
    label = max(map(len, columns))
    for row in rows:
        cells = list(zip(columns, row, strict=True))
        if text_columns:
            (name, text), *cells = cells
            say(f"{name} {text}".strip() or "-")
        for name, text in cells:
            if text:
                say(f"  {name:{label}}  {text}" if label else f"  {text}")


def chart(drawn: Chart) -> None:
    console = stdout()
    width = min(100, console.width - 12) if console.is_terminal else 72
    *lines, legend = draw(drawn, width=max(20, width))
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    say(legend)


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
def full_screen() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Take over the terminal. Yield a function that calls another function and shows its stdout on the whole screen."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    screen = stdout()

    def show(draw: Callable[[], None]) -> None:
        written = io.StringIO()
        page = Console(file=written, force_terminal=True, width=screen.width, highlight=False)
        _redirected.append(page)
        try:
            draw()
        finally:
            _redirected.remove(page)
        live.update(Text.from_ansi(written.getvalue()), refresh=True)

    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # after the screen is restored
    try:
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            yield show
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a Progress callback that shows bars if stderr is a terminal, else prints a line there now and then."""
    if sys.stderr.isatty():
        with _bars() as bars, shown(bars):
            yield bars
        return
    log = LogProgress(say=_logger.info) if _notes_are_logged else LogProgress()
    with shown(log), repeated(log.tell, QUIET_S):  # also while a stage reports nothing
        yield log
    log.done()


def _bars() -> Any:
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
            yield self.make_tasks_table(self.tasks[-_MOST_BARS:])
            if self._detail:
                yield Text(f"  {self._detail}", no_wrap=True, overflow="crop")

    return Bars()
