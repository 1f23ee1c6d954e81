"""Content of a report, which is printed in a terminal or written to an HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmsched.cli import render
from llmsched.cli.chart import Chart
from llmsched.cli.figures.experiment import MeasuredRun
from llmsched.cli.html_page import Page


class Table(NamedTuple):
    """Table of text cells. The first `text_columns` columns are left-aligned words, the others figures.

    A narrow terminal leaves out the columns named in `spare`, the last one first.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    spare: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReportContent:
    """Content of a report, from top to bottom. A terminal shows only the first `terminal_charts` charts.

    It shows `decisions`, which the command made for the user, on stderr.
    """

    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    conclusions: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    terminal_charts: int = 0
    closing: Sequence[str] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)
    decisions: Sequence[str] = ()
    errors: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a mode of `bench`: the JSON report and its content. If `well` is False, the exit code is 1.

    `rows` are the JSON reports of single runs, for the CSV file. `run` is the run that --save-detailed writes. Only the
    end of the HTML page shows `detail`.
    """

    report: Mapping[str, Any]
    content: ReportContent
    well: bool
    rows: Sequence[Mapping[str, Any]]
    run: MeasuredRun | None = None
    detail: ReportContent | None = None


def show(content: ReportContent, *, definitions: bool = False) -> None:
    """Print a report: notes, tables, charts and sentences on stdout, then decisions, errors and warnings on stderr.

    At the end come the definitions, if they are wanted.
    """
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
    """Return a result as an HTML page that opens offline."""
    title = f"llmsched bench: {result.report['target']}" if "target" in result.report else "llmsched bench"
    return report_page(title, [result.content, *([result.detail] if result.detail else [])], result.report)


def report_page(title: str, contents: Sequence[ReportContent], document: Mapping[str, Any]) -> str:
    """Return an HTML page that opens offline, with all `contents` and, at the end, the JSON report `document`."""
    page = Page(title)
    for content in contents:
        for note in content.notes:
            page.say(note)
        for sentence in (*content.decisions, *content.errors, *content.warnings):
            page.warn(sentence)
        for table in content.tables:
            if table.title:
                page.heading(table.title)
            page.table(table.columns, table.rows)
        for conclusion in content.conclusions:
            page.say(conclusion)
        if content.charts:
            page.heading("charts")
        for chart in content.charts:
            page.chart(chart)
        for sentence in content.closing:
            page.say(sentence)
        if content.definitions:
            page.heading("definitions")
            page.terms(content.definitions)
    page.heading("report")
    page.code(json.dumps(document, indent=1, allow_nan=False))
    return page.html()
