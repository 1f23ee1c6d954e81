from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, NamedTuple

from llmsched.cli import render
from llmsched.cli.chart import Chart
from llmsched.cli.figures.experiment import MeasuredRun
from llmsched.cli.html_page import Page
from llmsched.engine.device import device_memory


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1  # columns on the left that hold words, not figures
    spare: Sequence[str] = ()  # columns that a narrow terminal leaves out, the last one first


@dataclass(frozen=True, slots=True)
class ReportContent:
    """Content of a report, for a terminal or an HTML page."""

    title: str = ""
    verdict: str = ""
    summary: Sequence[tuple[str, str]] = ()  # figures with their names, for an HTML page only
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    conclusions: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    terminal_charts: int = 0  # number of charts that a terminal shows
    closing: Sequence[str] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)
    decisions: Sequence[str] = ()  # choices that the command made for the user
    errors: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Report of `bench` as JSON and as `content`."""

    report: Mapping[str, Any]
    content: ReportContent
    well: bool  # if False, the exit code is 1
    rows: Sequence[Mapping[str, Any]]  # JSON reports for the CSV file
    run: MeasuredRun | None = None  # for --save-detailed
    detail: ReportContent | None = None  # shown at the end of the HTML page


def show(content: ReportContent, *, definitions: bool = False) -> None:
    """Print a report on stdout; its errors, warnings and `decisions` (choices made for the user) go to stderr."""
    for note in content.notes:
        render.say(note)
    for table in content.tables:
        render.table(table.title, table.columns, table.rows, text_columns=table.text_columns, spare=table.spare)
    for conclusion in content.conclusions:
        render.say(conclusion)
    for chart in content.charts[: content.terminal_charts]:
        render.chart(chart)
    for sentence in content.closing:
        render.say(sentence)
    if content.verdict:
        render.say(content.verdict)
    for decision in content.decisions:
        render.note(decision)
    for error in content.errors:
        render.error(error)
    for warning in content.warnings:
        render.warn(warning)
    if definitions:
        for term, sentence in content.definitions.items():
            render.say(f"{term}: {sentence}")


def result_page(result: Result) -> str:
    run = result.report if "where" in result.report else result.report["runs"][0]  # the runs of --compare
    where, device = run["where"], run["engine"].get("device", "auto")
    if where == "in process":
        where = device_memory(device).name
    elif run["measured"]:
        where = f"unknown (server {where}); the load came from a {device_memory('cpu').name}"
    contents = [result.content, *([result.detail] if result.detail else [])]
    return report_page(f"llmsched bench: {run['target']}", contents, result.report, where)


def report_page(title: str, contents: Sequence[ReportContent], document: Mapping[str, Any], hardware: str) -> str:
    """Return an HTML page that opens offline, with all `contents` and, at the end, the JSON report `document`."""
    page = Page(title)
    for index, content in enumerate(contents):
        if content.title:
            page.heading(content.title)
        if content.verdict:
            page.say(content.verdict, "verdict")
        page.figures(content.summary)
        for kind, sentences in (("error", content.errors), ("warning", content.warnings)):
            for sentence in sentences:
                page.say(sentence, kind)
        if index == 0:
            page.terms(_provenance(document["measured"], hardware))
        for note in content.notes:
            page.say(note)
        for decision in content.decisions:
            page.say(decision, "note")
        for table in content.tables:
            if table.title:
                page.heading(table.title, 3)
            page.table(table.columns, table.rows, table.text_columns)
        for conclusion in content.conclusions:
            page.say(conclusion)
        for chart in content.charts:
            page.chart(chart)
        for sentence in content.closing:
            page.say(sentence)
    page.heading("definitions")
    page.terms({term: text for content in contents for term, text in content.definitions.items()})
    page.heading("report")
    page.code(json.dumps(document, indent=1, allow_nan=False))
    return page.html()


def _provenance(measured: bool, hardware: str) -> dict[str, str]:
    command = shlex.join(["llmsched", *sys.argv[1:]])
    return {
        "figures": "measured" if measured else "simulated",
        "hardware": hardware,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "version": f"llmsched {version('llmsched')}",
        "command": re.sub(r"(--api-key[ =])('[^']*'|\S+)", r"\1KEY", command),
    }
