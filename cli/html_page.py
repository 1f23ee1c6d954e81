"""Self-contained HTML page with tables, SVG charts and text. The page loads no other files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from llmsched.cli.chart import Axis, Chart, Point, Series, axes, drawable, number, thin

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 16, 44
_COLOURS = ("#2a78d6", "#d9622b", "#2e9e6b", "#9a5fc9", "#c2a100", "#6b7280", "#c94f7c")

#: Maximum number of points drawn of a series. More points could not be distinguished at this width.
_MOST_POINTS = 600

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
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
svg .grid { stroke: currentColor; stroke-opacity: .15; }
svg .limit { stroke: currentColor; stroke-dasharray: 5 4; stroke-opacity: .7; }
svg .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .dots { stroke-width: 4; stroke-linecap: round; stroke-opacity: .55; fill: none; }
.legend span { margin-right: 1.2em; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
"""


class Page:
    """HTML page that is filled from top to bottom. All text is escaped."""

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
        self._body.append(chart_html(chart))

    def terms(self, definitions: Mapping[str, str]) -> None:
        pairs = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in definitions.items())
        self._body.append(f"<dl>{pairs}</dl>")

    def example(self, text: str) -> None:
        """Add a text to copy, such as a command."""
        self._body.append(f"<pre>{escape(text)}</pre>")

    def code(self, text: str) -> None:
        """Add a long text that stays folded until the reader opens it."""
        self._body.append(f"<details><summary>show</summary><pre>{escape(text)}</pre></details>")

    def html(self) -> str:
        """Return the whole page."""
        return (
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{self._title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style></head>\n<body><h1>{self._title}</h1>\n"
            + "\n".join(self._body)
            + "\n</body></html>\n"
        )


def chart_html(chart: Chart) -> str:
    """Return a chart with its title and legend as an HTML figure, or a note if it has no points."""
    title = escape(chart.title)
    if not any(series.points for series in drawable(chart).series):
        return f"<figure><figcaption>{title}</figcaption><p>nothing to show</p></figure>"
    keys = "".join(
        f'<span><i style="background:{_colour(index)}"></i>{escape(series.name)}</span>'
        for index, series in enumerate(chart.series)
    )
    return f'<figure><figcaption>{title}</figcaption><div class="legend">{keys}</div>{_svg(chart)}</figure>'


def _svg(chart: Chart) -> str:
    (x_axis, y_axis), chart = axes(chart), drawable(chart)
    parts = [_grid(chart, x_axis, y_axis)]
    order = reversed(range(len(chart.series))) if chart.stacked else range(len(chart.series))
    for index in order:
        series = chart.series[index]
        places = [(_across(x_axis.place(x)), _down(y_axis.place(y))) for x, y in thin(series.points, _MOST_POINTS)]
        if places:
            parts.append(_mark(series, places, _colour(index), chart.stacked))
    for name, value in chart.limits:
        if 0 <= (share := y_axis.place(value)) <= 1:
            parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {_level(share)}/>')
            parts.append(
                f'<text x="{_WIDTH - _RIGHT}" y="{_down(share) - 4:.1f}" text-anchor="end">{escape(name)}</text>'
            )
    for name, value in chart.marks:
        x = f"{_across(x_axis.place(value)):.1f}"
        parts.append(f'<line class="limit" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{x}" y="{_TOP - 2}" text-anchor="middle">{escape(name)}</text>')
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
    return f'{head} aria-label="{escape(chart.title)}">{"".join(parts)}</svg>'


def _grid(chart: Chart, x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks:
        share = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {_level(share)}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{_down(share) + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    bottom = _HEIGHT - _BOTTOM
    for tick in x_axis.ticks:
        x = f"{_across(x_axis.place(tick)):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(chart.x)}</text>')
    turn = f'transform="rotate(-90 14 {middle})"'
    parts.append(f'<text x="14" y="{middle}" text-anchor="middle" {turn}>{escape(chart.y)}</text>')
    return "".join(parts)


def _mark(series: Series, places: Sequence[Point], colour: str, stacked: bool) -> str:
    if stacked:
        base = _HEIGHT - _BOTTOM
        outline = [(places[0][0], base), *places, (places[-1][0], base)]
        return f'<path d="M{_joined(outline)}Z" fill="{colour}"/>'
    if series.style == "dots":
        # A stroke of length 0 is a round dot, in far fewer bytes than a circle.
        return f'<path class="dots" stroke="{colour}" d="{"".join(f"M{x:.1f},{y:.1f}h0" for x, y in places)}"/>'
    if series.style == "steps":
        corners = [(place[0], before[1]) for before, place in pairwise(places)]
        places = [*places[:1], *(point for pair in zip(corners, places[1:], strict=True) for point in pair)]
    return f'<path class="line" stroke="{colour}" d="M{_joined(places)}"/>'


def _joined(places: Sequence[Point]) -> str:
    return "L".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _down(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _level(share: float) -> str:
    return f'y1="{_down(share):.1f}" y2="{_down(share):.1f}"'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
