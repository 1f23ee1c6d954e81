from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from llmsched.cli.chart import Axis, Chart, Point, Series, axes, drawable, thin, tick_label

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 36, 52
_COLOURS = ("#2a78d6", "#d9622b", "#2e9e6b", "#9a5fc9", "#c2a100", "#17929b", "#c94f7c")

#: Maximum number of points drawn of a series. More points could not be distinguished at this width.
_MOST_POINTS = 600

#: Points of a series with at most this many are marked.
_FEW_POINTS = 40

#: On a narrow screen a chart shrinks, so its texts are larger relative to it, and every second label of x is left out.
_STYLE = """
:root { color-scheme: light dark; --edge: rgb(128 128 128 / .4); }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1160px; margin: 1.5em auto; padding: 0 1em;
  overflow-wrap: anywhere; }
body > :not(.scroll) { max-width: 780px; }
h1 { font-size: 1.3em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin-bottom: 0; }
.verdict { font-size: 1.15em; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5em, 1fr)); gap: .5em; }
.figures div { border: 1px solid var(--edge); border-radius: 6px; padding: .4em .6em; font-size: .78em; }
.figures b { display: block; font-size: 1.4em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6em 0; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td, th { padding: .15em .8em .15em 0; text-align: right; }
td { white-space: nowrap; vertical-align: top; }
.text { text-align: left; } td.text { white-space: pre-wrap; min-width: 6em; }
th { border-bottom: 1px solid; vertical-align: bottom; } figure { margin: 1em 0 2em; } figcaption { font-weight: 600; }
.note, .warning, .error { border-left: 4px solid var(--edge); padding-left: .8em; }
.note { font-size: .9em; } .warning { border-color: #c2a100; } .error { border-color: #d03b3b; }
dl { display: grid; grid-template-columns: auto 1fr; gap: .2em .8em; font-size: .9em; }
dt { font-weight: 600; } dd { margin: 0; }
pre { overflow-x: auto; font-size: .85em; }
.example { white-space: pre-wrap; background: rgb(128 128 128 / .12); border-radius: 6px; padding: .5em .7em; }
svg { display: block; width: 100%; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
svg line, svg path { vector-effect: non-scaling-stroke; }
svg .grid { stroke: currentColor; stroke-opacity: .15; }
svg .limit { stroke: currentColor; stroke-dasharray: 5 4; stroke-opacity: .7; }
svg .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
svg .dots, svg .points { stroke-width: 4; stroke-linecap: round; stroke-opacity: .55; fill: none; }
svg .points { stroke-width: 7; stroke-opacity: 1; }
@media (max-width: 520px) { svg text { font-size: 21px; } svg .odd { display: none; }
  td.text { min-width: 0; } table:not(:has(thead)) td { white-space: normal; } }
.legend span { margin-right: 1.2em; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
"""


class Page:
    """HTML page in one file, with tables, SVG charts and text. All text is escaped."""

    def __init__(self, title: str) -> None:
        self._title = escape(title)
        self._body: list[str] = []

    def heading(self, text: str, level: int = 2) -> None:
        self._body.append(f"<h{level}>{escape(text)}</h{level}>")

    def say(self, text: str, kind: str = "") -> None:
        """Add a paragraph. `kind` is a class of the style sheet: "verdict", "note", "warning" or "error"."""
        self._body.append(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def figures(self, figures: Sequence[tuple[str, str]]) -> None:
        """Add the most important figures: pairs of a name and a value."""
        boxes = "".join(f"<div>{escape(name)}<b>{escape(value)}</b></div>" for name, value in figures)
        self._body.append(f'<div class="figures">{boxes}</div>')

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
        """Add a table. The first `text_columns` columns are aligned left."""

        def cells(tag: str, row: Sequence[str]) -> str:
            kinds = [' class="text"' if index < text_columns else "" for index in range(len(row))]
            found = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))
            return f"<tr>{''.join(found)}</tr>"

        head = f"<thead>{cells('th', columns)}</thead>" if any(columns) else ""
        body = "".join(cells("td", row) for row in rows)
        self._body.append(f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>')

    def chart(self, chart: Chart) -> None:
        self._body.append(chart_html(chart))

    def terms(self, definitions: Mapping[str, str]) -> None:
        pairs = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in definitions.items())
        self._body.append(f"<dl>{pairs}</dl>")

    def example(self, text: str) -> None:
        """Add a text to copy, such as a command."""
        self._body.append(f'<pre class="example">{escape(text)}</pre>')

    def code(self, text: str) -> None:
        """Add a long text that stays folded until the reader opens it."""
        self._body.append(f"<details><summary>show</summary><pre>{escape(text)}</pre></details>")

    def html(self) -> str:
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
        anchor, aside = ("start", 5) if x_axis.place(value) < 0.5 else ("end", -5)
        parts.append(f'<text x="{x}" dx="{aside}" y="{_TOP + 16}" text-anchor="{anchor}">{escape(name)}</text>')
    head = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
    return f'{head} aria-label="{escape(chart.title)}">{"".join(parts)}</svg>'


def _grid(chart: Chart, x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks:
        share = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {_level(share)}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{_down(share) + 4:.1f}" text-anchor="end">{tick_label(tick)}</text>')
    bottom = _HEIGHT - _BOTTOM
    for index, tick in enumerate(x_axis.ticks):
        x, odd = f"{_across(x_axis.place(tick)):.1f}", ' class="odd"' if index % 2 else ""
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle"{odd}>{tick_label(tick)}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(chart.x)}</text>')
    parts.append(f'<text x="0" y="18">{escape(chart.y)}</text>')
    return "".join(parts)


def _mark(series: Series, places: Sequence[Point], colour: str, stacked: bool) -> str:
    if stacked:
        base = _HEIGHT - _BOTTOM
        outline = [(places[0][0], base), *places, (places[-1][0], base)]
        return f'<path d="M{_joined(outline)}Z" fill="{colour}"/>'
    # A stroke of length 0 is a round dot, in far fewer bytes than a circle.
    kind, dots = "points" if len(places) <= _FEW_POINTS else "dots", "".join(f"M{x:.1f},{y:.1f}h0" for x, y in places)
    marked = f'<path class="{kind}" stroke="{colour}" d="{dots}"/>'
    if series.style == "dots":
        return marked
    if series.style == "steps":
        corners = [(place[0], before[1]) for before, place in pairwise(places)]
        places = [*places[:1], *(point for pair in zip(corners, places[1:], strict=True) for point in pair)]
    line = f'<path class="line" stroke="{colour}" d="M{_joined(places)}"/>'
    return line + marked if series.style == "line" and kind == "points" else line


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
