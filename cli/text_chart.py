"""Charts made of characters."""

from __future__ import annotations

from itertools import pairwise

from llmsched.cli.chart import Axis, Chart, Series, axes, layers, limits, number
from llmsched.cli.chart import marks as marks_of

#: One mark per series, then from the beginning; for streams that take any character, and for those that do not.
MARKS = "●+◆○*"
PLAIN_MARKS = "o+x.*"

_LIMIT, _MARK = "-", ":"


def draw(chart: Chart, *, width: int = 72, height: int = 12, marks: str = PLAIN_MARKS) -> list[str]:
    """The lines of a chart: title, grid with ticks, legend. `width` and `height` are of the grid, in characters."""
    x_axis, y_axis = axes(chart)
    grid = [[" "] * width for _ in range(height)]
    for _, value in limits(chart):
        if 0 <= (share := y_axis.place(value)) <= 1:
            grid[_row(share, height)] = [_LIMIT] * width
    for _, value in marks_of(chart):
        for cells in grid:
            cells[round(x_axis.place(value) * (width - 1))] = _MARK
    shown = layers(chart)
    # The last one is drawn first, so that of a stack the lower layers stay in sight.
    for index in reversed(range(len(shown))):
        for column, row in _cells(shown[index], x_axis, y_axis, width, height):
            grid[row][column] = marks[index % len(marks)]
    ticks = {_row(y_axis.place(tick), height): number(tick) for tick in y_axis.ticks}
    margin = max((len(label) for label in ticks.values()), default=0)
    lines = [chart.title]
    lines += [f"{ticks.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    lines.append(f"{'':>{margin}} +{'-' * width}")
    lines.append(f"{'':>{margin}}  {_tick_line(x_axis, width)}")
    lines.append(f"{'':>{margin}}  {_legend(chart, marks)}")
    return lines


def _row(share: float, height: int) -> int:
    return height - 1 - min(height - 1, max(0, round(share * (height - 1))))


def _cells(series: Series, x_axis: Axis, y_axis: Axis, width: int, height: int) -> set[tuple[int, int]]:
    """The column and row of everything that a series covers."""
    places = [(round(x_axis.place(x) * (width - 1)), y_axis.place(y)) for x, y in series.points]
    cells = {(column, _row(share, height)) for column, share in places}
    if series.style == "dots":
        return cells
    for (column, share), (next_column, next_share) in pairwise(places):
        for between in range(column + 1, next_column):
            slope = (next_share - share) / (next_column - column) if series.style == "line" else 0.0
            cells.add((between, _row(share + slope * (between - column), height)))
    return cells


def _tick_line(x_axis: Axis, width: int) -> str:
    """The ticks of the horizontal axis, those left out that would run into another."""
    line = ""
    for tick in x_axis.ticks:
        label = number(tick)
        start = round(x_axis.place(tick) * (width - 1))
        if not line or start > len(line):
            line = line.ljust(start) + label
    return line


def _legend(chart: Chart, marks: str) -> str:
    parts = [f"{marks[index % len(marks)]} {series.name}" for index, series in enumerate(chart.series)]
    parts += [f"{_LIMIT} {name}" for name, _ in limits(chart)] + [f"{_MARK} {name}" for name, _ in marks_of(chart)]
    return f"{'  '.join(parts)}   ({chart.y} over {chart.x})"
