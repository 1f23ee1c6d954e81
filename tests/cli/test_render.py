"""Terminal output and units, mostly for streams that are not a terminal."""

from __future__ import annotations

import io
import json
import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest
from command_line import Terminal
from rich.console import Console

from llmsched.cli import render
from llmsched.cli.progress_display import LogProgress, detail, repeated


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (24 << 30, "24.0 GiB"),
        (5 << 40, "5.00 TiB"),
        (800 << 20, "800 MiB"),
    ],
)
def test_bytes_are_binary(count: int, text: str) -> None:
    assert render.human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0123, "12.3 ms"), (0.9, "900 ms"), (1.5, "1.50 s"), (75, "75.0 s")])
def test_seconds(seconds: float, text: str) -> None:
    assert render.human_seconds(seconds) == text


def test_a_table_is_plain_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 150
    render.table("Title", ("name", "figure"), [("[bold]literal[/bold]", "1"), (long, "20")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "Title"
    assert lines[1].split() == ["name", "figure"]
    assert lines[2].split() == ["[bold]literal[/bold]", "1"]
    assert lines[3].split() == [long, "20"]


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A name from a file must not move the cursor or set the title of the window."""
    evil = "a\x1b[2J\x1b]0;title\x07\x9bm\rb"
    render.table("", ("name",), [(evil,)])
    for write in (render.say, render.note, render.warn, render.error):
        write(evil)
    out, err = capsys.readouterr()
    assert not {char for char in out + err if char < " "} - {"\n"}
    assert "\x9b" not in out + err
    assert out.count(r"a\x1b[2J\x1b]0;title\x07") == 2
    assert err.count(r"a\x1b[2J") == 3


class Colour(Enum):
    RED = "red"


@dataclass
class Thing:
    path: Path
    colour: Colour


def test_json_of_python_objects(capsys: pytest.CaptureFixture[str]) -> None:
    render.emit_json({"thing": Thing(Path("a/b"), Colour.RED), "set": {2, 1}, "none": None})
    wanted = {"thing": {"path": "a/b", "colour": "red"}, "set": [1, 2], "none": None}
    assert json.loads(capsys.readouterr().out) == wanted


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_json_refuses_other_values(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, TypeError)):
        render.emit_json({"value": value})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("fails", [False, True])
def test_short_work_says_nothing_in_a_log(capsys: pytest.CaptureFixture[str], fails: bool) -> None:
    detail("heard by no progress")
    with pytest.raises(RuntimeError) if fails else nullcontext(), render.progress_bar() as progress:
        progress("loading", 0, 8)
        detail("3 running")
        if fails:
            raise RuntimeError
        progress("loading", 8, 8)
    assert capsys.readouterr().err == ""


def test_long_work_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """At most one line every 10 s."""
    clock = iter([0.0, 0.5, 1.5, 1.5, 2.0, 11.4, 12.0, 12.0, 13.0, 30.0])
    progress = LogProgress(lambda: next(clock))
    progress("loading", 1, 8)  # at 0.5 s
    progress.detail("3 running")
    progress("loading", 2, 8)  # at 1.5 s
    progress("loading", 8, 8)  # at 2 s
    progress.detail("old")
    progress("waiting", 0, 0)  # at 11.4 s
    progress.detail("2 running")
    progress("waiting", 0, 0)  # at 12 s
    progress("waiting", 0, 0)  # at 13 s
    progress.done()
    assert capsys.readouterr().err.splitlines() == [
        "loading ... 25 % (3 running)",
        "waiting ... (2 running)",
        "done after 30.0 s",
    ]


def test_a_stage_that_reports_nothing_more_is_named_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 0.5, 1.5])
    progress = LogProgress(lambda: next(clock, 2.0))
    progress("compiling", 0, 1)  # at 0.5 s
    told = threading.Event()

    def tell() -> None:
        progress.tell()
        told.set()

    with repeated(tell, 0.001):
        assert told.wait(10)
    assert capsys.readouterr().err == "compiling ...\n"


def test_notes_go_to_stderr_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    render.note("a [red]fact[/red]")
    render.warn("careful")
    render.error("first\nsecond")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["note: a [red]fact[/red]", "warning: careful", "error: first second"]


def test_on_a_narrow_terminal_the_detail_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns the bar, how many are done, and the times stay readable."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(render, "stderr", lambda: console)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with render.progress_bar() as progress:
        progress("requests", 12, 300)
        detail("17.1 requests/s, 12 running, TTFT P50 104 ms, ITL P50 20.0 ms")
    lines = [line.strip() for line in written.getvalue().splitlines()]
    assert any(line.endswith("-:--:--") and " 12/300 " in line for line in lines)
    assert any(line.startswith("17.1 requests/s") and line.endswith("ITL P50 20.0 ms") for line in lines)


def test_a_narrow_terminal_breaks_the_column_names(terminal: Terminal) -> None:
    columns, rows = ["", "output tokens/s", "TTFT P50"], [["a", "10000.00", "12.5"]]
    written = terminal(28)
    render.table("", columns, rows)
    assert written().splitlines()[1:] == ["   output tokens/s  TTFT P50", "a         10000.00      12.5"]
    written = terminal(25)
    render.table("", columns, rows)
    assert written().splitlines()[1:] == ["     output  TTFT", "   tokens/s   P50", "a  10000.00  12.5"]


def test_columns_that_a_narrow_terminal_leaves_out_are_named(terminal: Terminal) -> None:
    columns, rows = ["", "runs", "empty", "requests", "P99"], [["best", "3", "", "200", "12.5"]]
    written = terminal(24)
    render.table("", columns, rows, spare=("requests", "runs"))
    assert written().splitlines()[1:] == [
        "      requests   P99",
        "best       200  12.5",
        "not shown at this width:",
        "runs",
    ]
    written = terminal(18)
    render.table("", columns, rows)
    assert written().splitlines()[1:] == ["best", "  runs      3", "  requests  200", "  P99       12.5"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_words_and_figures_stay_whole_at_any_width(terminal: Terminal, width: int) -> None:
    """Neither a table nor a sentence breaks a word, exceeds the terminal or ends in blanks."""
    written = terminal(width)
    columns = ["", "max_num_seqs", "P99 TTFT ms", "P99 95% CI", "why"]
    rows = [["best, default", "1,024", "38949.2", "15.7 to 16.9", ""], ["misses SLO", "8", "7.1", "n/a", ""]]
    render.table("settings at 34.2 requests/s", columns, rows, spare=("P99 95% CI",))
    render.table("", ["at", "what", "why"], [["0.0", "admitted", "no cached prompt matches"]], text_columns=3)
    render.say("KV memory  79.2 GiB x 0.9 - 15.0 GiB weights = 55.6 GiB")
    render.note("headroom was not searched")
    lines = written().splitlines()
    words = " ".join(lines).split()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]
    for word in ("max_num_seqs", "38949.2", "1,024", "admitted", "matches", "searched", "weights"):
        assert word in words


def test_a_label_stands_beside_the_first_line_of_its_text(terminal: Terminal) -> None:
    written = terminal(40)
    render.table("", ["", ""], [["running", "at most 128 requests (max_num_seqs); up to 2048 more"]], text_columns=2)
    lines = ["running  at most 128 requests", "         (max_num_seqs); up to 2048 more"]
    assert written().splitlines()[1:] == lines


def test_the_legend_of_a_chart_wraps_below_its_beginning(terminal: Terminal) -> None:
    written = terminal(30)
    render.say("     o TTFT  + TPOT  x worst stall   (ms over s)")
    assert written().splitlines() == ["     o TTFT  + TPOT  x worst", "     stall   (ms over s)"]


def test_text_to_copy_is_not_wrapped(terminal: Terminal) -> None:
    written = terminal(20)
    render.say("llmsched chat --url http://127.0.0.1:8001", wrap=False)
    assert written() == "llmsched chat --url http://127.0.0.1:8001\n"
