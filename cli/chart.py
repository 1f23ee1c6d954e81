"""Charts, and functions that draw them with text characters. The module html_page draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

Point = tuple[float, float]

#: Characters for the points of each series. With more series they are used again.
_MARKS = "o+x.*"

_LIMIT, _MARK = "-", ":"


@dataclass(frozen=True, slots=True)
class Series:
    """Line of a chart. The style "steps" keeps each y until the next x."""

    name: str
    points: Sequence[Point]
    style: Literal["line", "steps", "dots"] = "line"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str  # label of the axis
    y: str  # label of the axis
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    stacked: bool = False  # draw each series on top of the previous one; all have points at the same x
    limits: tuple[tuple[str, float], ...] = ()  # horizontal lines with a name, such as an SLO
    marks: tuple[tuple[str, float], ...] = ()  # vertical lines with a name
    span: tuple[float, ...] = ()  # values that the x axis covers at least


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Return the position of a value: 0 at the low end of the axis, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis(values: Iterable[float], *, log: bool = False, from_zero: bool = False) -> Axis:
    """Return an axis that covers all finite values (and 0 if `from_zero`), with about five round ticks."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(known), max(known)) if known else (1.0, 1.0) if log else (0.0, 1.0)
    if log:
        if high < 4 * low:
            low, high = low / 2, high * 2
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if high < 300 * low else (1,)
        marks = [factor * 10.0**power for power in powers for factor in factors]
        return Axis(low, high, True, tuple(mark for mark in marks if low <= mark <= high))
    low = min(low, 0.0) if from_zero else low
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    # The next larger 1, 2 or 5 times a power of ten.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    marks = [step * n for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, False, tuple(marks))


def axes(chart: Chart) -> tuple[Axis, Axis]:
    chart = drawable(chart)
    shown = [point for series in chart.series for point in series.points]
    heights = [y for _, y in shown] + [value for _, value in chart.limits]
    widths = [x for x, _ in shown] + [value for _, value in chart.marks] + list(chart.span)
    return axis(widths, log=chart.log_x), axis(heights, log=chart.log_y, from_zero=True)


def drawable(chart: Chart) -> Chart:
    """Return a copy without values that cannot be drawn. A stacked chart adds up its series."""

    def fits(value: float, log: bool) -> bool:
        return math.isfinite(value) and (value > 0 or not log)

    tops: dict[float, float] = {}
    series = []
    for one in chart.series:
        points = [(x, y) for x, y in one.points if fits(x, chart.log_x) and fits(y, chart.log_y)]
        if chart.stacked:
            for x, y in points:
                tops[x] = tops.get(x, 0.0) + y
            points = [(x, tops[x]) for x, _ in points]
        series.append(Series(one.name, points, one.style))
    limits = tuple((name, value) for name, value in chart.limits if fits(value, chart.log_y))
    marks = tuple((name, value) for name, value in chart.marks if fits(value, chart.log_x))
    return replace(chart, series=tuple(series), limits=limits, marks=marks)


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of the points, in order. The highest and the lowest points are kept."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, most // 2)
    kept: list[Point] = []
    for index in range(stretches):
        part = range(len(points) * index // stretches, len(points) * (index + 1) // stretches)
        low = min(part, key=lambda i: points[i][1])
        high = max(part, key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({low, high})]
    return kept


def distribution(samples: Sequence[float], most: int = 1000) -> list[Point]:
    """Return about `most` points of the samples' cumulative distribution: (value, percentage of samples up to it)."""
    ordered = sorted(samples)
    step = max(1, len(ordered) // most)
    ranks = [*range(0, len(ordered), step)]
    if ordered and ranks[-1] != len(ordered) - 1:
        ranks.append(len(ordered) - 1)
    return [(ordered[rank], 100.0 * (rank + 1) / len(ordered)) for rank in ranks]


def tick_label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}"
    return f"{value:.6g}"


def draw(chart: Chart, *, width: int = 72, height: int = 12) -> list[str]:
    (x_axis, y_axis), chart = axes(chart), drawable(chart)
    grid = [[" "] * width for _ in range(height)]
    for _, value in chart.limits:
        if 0 <= (share := y_axis.place(value)) <= 1:
            grid[_row(share, height)] = [_LIMIT] * width
    for _, value in chart.marks:
        for cells in grid:
            cells[round(x_axis.place(value) * (width - 1))] = _MARK
    # The last series is drawn first, so that the lower layers of a stack stay visible.
    for index in reversed(range(len(chart.series))):
        for column, row in _cells(chart.series[index], x_axis, y_axis, width, height):
            grid[row][column] = _MARKS[index % len(_MARKS)]
    ticks = {_row(y_axis.place(tick), height): tick_label(tick) for tick in y_axis.ticks}
    margin = max((len(label) for label in ticks.values()), default=0)
    lines = [chart.title]
    lines += [f"{ticks.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    lines.append(f"{'':>{margin}} +{'-' * width}")
    labels = ""
    for tick in x_axis.ticks:
        start = round(x_axis.place(tick) * (width - 1))
        if not labels or start > len(labels):  # otherwise it would overlap the previous label
            labels = labels.ljust(start) + tick_label(tick)
    lines.append(f"{'':>{margin}}  {labels}")
    legend = [f"{_MARKS[index % len(_MARKS)]} {series.name}" for index, series in enumerate(chart.series)]
    legend += [f"{_LIMIT} {name}" for name, _ in chart.limits] + [f"{_MARK} {name}" for name, _ in chart.marks]
    lines.append(f"{'':>{margin}}  {'  '.join(legend)}   ({chart.y} over {chart.x})")
    return lines


def _row(share: float, height: int) -> int:
    return height - 1 - min(height - 1, max(0, round(share * (height - 1))))


def _cells(series: Series, x_axis: Axis, y_axis: Axis, width: int, height: int) -> set[tuple[int, int]]:
    places = [(round(x_axis.place(x) * (width - 1)), y_axis.place(y)) for x, y in series.points]
    cells = {(column, _row(share, height)) for column, share in places}
    if series.style == "dots":
        return cells
    for (column, share), (next_column, next_share) in pairwise(places):
        for between in range(column + 1, next_column):
            slope = (next_share - share) / (next_column - column) if series.style == "line" else 0.0
            cells.add((between, _row(share + slope * (between - column), height)))
    return cells
