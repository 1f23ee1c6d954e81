"""Charts: axes, values that are left out, and both ways of drawing."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from html_pages import parsed

from llmsched.cli import html_page, render
from llmsched.cli.chart import Chart, Series, axis, distribution, draw, drawable, thin, tick_label
from llmsched.cli.html_page import Page

LINE = Chart("Line", "s", "ms", (Series("a", [(0.0, 0.0), (10.0, 10.0)]),))


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 10], (0, 2, 4, 6, 8, 10)),
        ([3.1, 4.9], (3.5, 4, 4.5)),
        ([7], (8, 10, 12, 14)),
        ([], (0, 0.2, 0.4, 0.6, 0.8, 1)),
    ],
)
def test_ticks_are_round_and_inside(values: list[float], ticks: tuple[float, ...]) -> None:
    made = axis(values)
    assert made.ticks == pytest.approx(ticks)
    assert all(0 <= made.place(tick) <= 1 for tick in made.ticks)


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios() -> None:
    made = axis([1.0, 0.0, -3.0, 10_000.0], log=True)
    assert (made.low, made.high) == (1.0, 10_000.0)
    assert made.place(100.0) == pytest.approx(0.5)
    assert made.ticks == pytest.approx((1, 10, 100, 1000, 10_000))


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    wild = Chart("", "", "", (Series("a", [(1, float("nan")), (float("inf"), 1), (1, 0), (0, 1), (1, 2)]),), True, True)
    assert drawable(wild).series[0].points == [(1, 2)]


def test_stacked_series_add_up() -> None:
    stack = Chart("", "", "", (Series("a", [(0, 1), (1, 2)]), Series("b", [(0, 3), (1, 4)])), stacked=True)
    assert [layer.points for layer in drawable(stack).series] == [[(0, 1), (1, 2)], [(0, 4), (1, 6)]]


def test_thinning_keeps_order_and_extremes() -> None:
    points = [(float(i), float(i % 100 == 50) - float(i % 100 == 70)) for i in range(10_000)]
    kept = thin(points, 200)
    assert len(kept) <= 200
    assert kept == sorted(kept)
    assert sum(y == 1 for _, y in kept) == sum(y == -1 for _, y in kept) == 100
    assert thin(points[:5], 200) == points[:5]


def test_a_distribution_counts_samples_up_to_a_value() -> None:
    assert distribution([3.0, 1.0, 2.0, 2.0]) == [(1.0, 25.0), (2.0, 50.0), (2.0, 75.0), (3.0, 100.0)]
    assert distribution([]) == []
    many = distribution([float(n) for n in range(100_000)], most=100)
    assert len(many) == 101
    assert (many[0], many[-1]) == ((0.0, 0.001), (99_999.0, 100.0))
    assert all(share == (value + 1) / 1000 for value, share in many)


def test_a_line_in_characters() -> None:
    assert draw(LINE, width=11, height=6) == [
        "Line",
        "10 |          o",
        " 8 |       ooo",
        " 6 |      o",
        " 4 |   ooo",
        " 2 |  o",
        " 0 |oo",
        "   +-----------",
        "    0 2 4 6 8 10",
        "    o a   (ms over s)",
    ]


def test_steps_and_dots_in_characters() -> None:
    points = [(0.0, 1.0), (9.0, 0.0)]
    steps = draw(Chart("", "x", "y", (Series("a", points, "steps"),)), width=10, height=2)
    dots = draw(Chart("", "x", "y", (Series("a", points, "dots"),)), width=10, height=2)
    assert steps[1].endswith("|ooooooooo")
    assert dots[1].endswith("|o")
    assert dots[2].endswith("|         o")


def test_limits_are_drawn_and_named() -> None:
    lines = draw(Chart("", "x", "y", LINE.series, limits=(("SLO", 10.0),)), width=11, height=3)
    assert lines[1] == "10 |--------ooo"
    assert lines[-1].strip() == "o a  - SLO   (y over x)"


def test_marks_are_drawn_and_named() -> None:
    chart = Chart("", "x", "y", LINE.series, marks=(("knee", 5.0), ("nowhere", float("nan"))))
    lines = draw(chart, width=11, height=3)
    assert lines[1] == "10 |     :  ooo"
    assert lines[-1].strip() == "o a  : knee   (y over x)"
    html = html_page.chart_html(chart)
    assert html.count('class="limit"') == 1
    assert "knee" in html


def test_an_axis_covers_its_span() -> None:
    assert draw(Chart("", "x", "y", LINE.series, span=(0.0, 20.0)), width=11, height=2)[1] == "10 |   ooo"


def test_limits_that_cannot_be_drawn_are_left_out() -> None:
    chart = Chart("", "x", "y", LINE.series, log_y=True, limits=(("zero", 0.0), ("endless", float("inf"))))
    assert "zero" not in draw(chart)[-1]
    assert 'class="limit"' not in html_page.chart_html(chart)


def test_a_chart_without_points(capsys: pytest.CaptureFixture[str]) -> None:
    empty = Chart("Empty", "x", "y", (Series("a", []),))
    render.chart(empty)
    assert capsys.readouterr().out.startswith("Empty\n")
    assert "nothing to show" in html_page.chart_html(empty)
    parsed(html_page.chart_html(empty))


@pytest.mark.parametrize("style", ["line", "steps", "dots"])
@pytest.mark.parametrize("stacked", [False, True])
def test_svg_is_well_formed_and_inside_its_box(style: str, stacked: bool) -> None:
    points = [(float(i), float(i * i % 37)) for i in range(100)]
    series = (Series("<a&b>", points, style), Series("b", points, style))  # type: ignore[arg-type]
    html = html_page.chart_html(Chart('a "title" <b>', "x", "y", series, stacked=stacked, limits=(("l<", 20.0),)))
    root = ElementTree.fromstring(re.search(r"<svg.*</svg>", html)[0])  # type: ignore[index]
    drawn = [e.attrib["d"] for e in root.iter() if e.tag.endswith("path")]
    assert len(drawn) == 2
    for path in drawn:
        places = [(float(x), float(y)) for x, y in re.findall(r"([\d.-]+),([\d.-]+)", path)]
        assert all(0 <= x <= 640 and 0 <= y <= 320 for x, y in places)
    parsed(html)


def test_few_points_are_marked_and_a_line_of_many_is_not() -> None:
    many = Series("a", [(float(i), float(i)) for i in range(100)])
    assert 'class="points"' in html_page.chart_html(LINE)
    assert 'class="points"' not in html_page.chart_html(Chart("", "x", "y", (many,)))


def test_svg_of_many_points_stays_small() -> None:
    points = [(float(i), float(i * 7919 % 1000)) for i in range(100_000)]
    assert len(html_page.chart_html(Chart("", "x", "y", (Series("a", points, "dots"),)))) < 20_000


def test_a_page_loads_nothing() -> None:
    page = Page("Run of <model> & co")
    page.heading("Latency")
    page.say("a < b")
    page.say("careful", "warning")
    page.table(["", "P99"], [["TTFT", "1 < 2"]])
    page.chart(LINE)
    page.terms({"TTFT": "time to first token"})
    html = page.html()
    tags = parsed(html)
    assert tags.fetched == []
    assert "url(" not in html
    assert "://" not in html
    assert "Run of <model> & co" in tags.text
    assert "1 < 2" in tags.text
    assert tags.seen.count("svg") == tags.seen.count("table") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (1500, "1500"), (2e6, "2e+06"), (1e-4, "1e-04"), (0.30000000000000004, "0.3")],
)
def test_numbers_beside_ticks(value: float, text: str) -> None:
    assert tick_label(value) == text
