"""One self-contained HTML page: tables, charts and words, nothing that has to be fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from llmsched.cli import svg
from llmsched.cli.chart import Chart

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 780px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; }
td, th { padding: .15em .8em .15em 0; text-align: right; }
td:first-child, th:first-child { text-align: left; white-space: pre-wrap; }
th { border-bottom: 1px solid; } figure { margin: 1em 0 2em; } figcaption { font-weight: 600; }
.warning { border-left: 4px solid #d9622b; padding-left: .8em; }
dt { font-weight: 600; float: left; margin-right: .6em; } dd { margin: 0 0 .3em 0; }
pre { overflow-x: auto; font-size: .85em; }
"""


class Page:
    """Grows from top to bottom; `html` is the whole of it. All text is taken literally."""

    def __init__(self, title: str) -> None:
        self._title = escape(title)
        self._body: list[str] = []

    def heading(self, text: str) -> None:
        self._body.append(f"<h2>{escape(text)}</h2>")

    def say(self, text: str) -> None:
        self._body.append(f"<p>{escape(text)}</p>")

    def warn(self, text: str) -> None:
        self._body.append(f'<p class="warning">{escape(text)}</p>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        head = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
        self._body.append(f"<table>{head}<tbody>{body}</tbody></table>")

    def chart(self, chart: Chart) -> None:
        self._body.append(svg.figure(chart))

    def terms(self, definitions: Mapping[str, str]) -> None:
        pairs = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in definitions.items())
        self._body.append(f"<dl>{pairs}</dl>")

    def code(self, text: str) -> None:
        """A long text that is folded away until somebody wants it."""
        self._body.append(f"<details><summary>show</summary><pre>{escape(text)}</pre></details>")

    def html(self) -> str:
        """The page, ready to be written to a file."""
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{self._title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}{svg.STYLE}</style></head>\n<body><h1>{self._title}</h1>\n"
            + "\n".join(self._body)
            + "\n</body></html>\n"
        )
