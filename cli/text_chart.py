"""Charts drawn with characters."""

from __future__ import annotations

from itertools import pairwise

from llmsched.cli.chart import Axis, Chart, Series, axes, drawable, number

#: One mark per series, repeated if there are more; for terminals, and for plain text.
MARKS = "●+◆○*"
PLAIN_MARKS = "o+x.*"

_LIMIT, _MARK = "-", ":"


def draw(chart: Chart, *, width: int = 72, height: int = 12, marks: str = PLAIN_MARKS) -> list[str]:
    """Return the lines of a chart: title, grid of `width` x `height` characters with ticks, legend."""
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
            grid[row][column] = marks[index % len(marks)]
    ticks = {_row(y_axis.place(tick), height): number(tick) for tick in y_axis.ticks}
    margin = max((len(label) for label in ticks.values()), default=0)
    lines = [chart.title]
    lines += [f"{ticks.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    lines.append(f"{'':>{margin}} +{'-' * width}")
    labels = ""
    for tick in x_axis.ticks:
        start = round(x_axis.place(tick) * (width - 1))
        if not labels or start > len(labels):  # else it would overlap the one before it
            labels = labels.ljust(start) + number(tick)
    lines.append(f"{'':>{margin}}  {labels}")
    legend = [f"{marks[index % len(marks)]} {series.name}" for index, series in enumerate(chart.series)]
    legend += [f"{_LIMIT} {name}" for name, _ in chart.limits] + [f"{_MARK} {name}" for name, _ in chart.marks]
    lines.append(f"{'':>{margin}}  {'  '.join(legend)}   ({chart.y} over {chart.x})")
    return lines


def _row(share: float, height: int) -> int:
    return height - 1 - min(height - 1, max(0, round(share * (height - 1))))


def _cells(series: Series, x_axis: Axis, y_axis: Axis, width: int, height: int) -> set[tuple[int, int]]:
    """Return the (column, row) cells that a series covers."""
    places = [(round(x_axis.place(x) * (width - 1)), y_axis.place(y)) for x, y in series.points]
    cells = {(column, _row(share, height)) for column, share in places}
    if series.style == "dots":
        return cells
    for (column, share), (next_column, next_share) in pairwise(places):
        for between in range(column + 1, next_column):
            slope = (next_share - share) / (next_column - column) if series.style == "line" else 0.0
            cells.add((between, _row(share + slope * (between - column), height)))
    return cells
