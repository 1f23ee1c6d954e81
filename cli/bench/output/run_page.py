"""A run as a page that opens offline: tables, charts, definitions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llmsched.cli.bench.output import tables
from llmsched.cli.bench.output.charts import run_charts
from llmsched.cli.bench.result import Measured, Result
from llmsched.cli.chart import Chart
from llmsched.cli.html_page import Page


def result_page(result: Result) -> str:
    """The HTML of a result: what the mode itself has to show, then the run that stands for it, if there is one."""
    title = f"llmsched bench: {result.report['target']}" if "target" in result.report else "llmsched bench"
    page = Page(title)
    for note in result.notes:
        page.say(note)
    for table in result.tables:
        _show_table(page, table)
    _show_charts(page, result.charts)
    if result.run is not None:
        _show_run(page, result.run)
    page.heading("report")
    page.code(json.dumps(result.report, indent=1, allow_nan=False))
    return page.html()


def _show_run(page: Page, run: Measured) -> None:
    experiment, figures = run
    page.say(experiment.headline())
    for caveat in experiment.provenance.caveats():
        page.say(caveat)
    for sentence in (*tables.failures(figures), *figures.warnings):
        page.warn(sentence)
    shown = [tables.latency_table(figures), tables.totals_table(figures)]
    shown += [table for table in (tables.slo_table(experiment.slo, figures), tables.stall_table(figures)) if table]
    for table in shown:
        _show_table(page, table)
    if (sentence_or_none := tables.reading_sentence(figures)) is not None:
        page.say(sentence_or_none)
    page.heading("charts")
    _show_charts(page, run_charts(figures, experiment.slo))
    page.heading("definitions")
    page.terms(tables.definitions(experiment.slo, figures))


def _show_table(page: Page, table: tables.Table) -> None:
    if table.title:
        page.heading(table.title)
    page.table(table.columns, table.rows)


def _show_charts(page: Page, charts: Sequence[Chart]) -> None:
    for chart in charts:
        page.chart(chart)
