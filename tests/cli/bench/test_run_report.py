"""Charts and tables of a run, and its HTML page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise

import pytest
from html_pages import parsed

from llmsched.cli import render
from llmsched.cli.bench.report.report_content import Result, result_page, show
from llmsched.cli.bench.report.run_charts import (
    latency_over_time,
    memory_over_time,
    queue_over_time,
    requests_over_time,
    run_charts,
    throughput_over_time,
)
from llmsched.cli.bench.report.run_report import definitions, run_content, totals_table
from llmsched.cli.chart import Series, axes
from llmsched.cli.figures.experiment import Experiment, MeasuredRun
from llmsched.cli.figures.kv_memory import KVMeter, TargetState
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord, RunRecord
from llmsched.cli.figures.registry import as_json
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.engine.goodput import Slo
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.provenance import Provenance

GIB = 1 << 30
MEMORY = MemoryParts(weights=2 * GIB, activations=GIB, other=0, kv=8 * GIB)
SAMPLES = [TargetState(100.5, 1, 2, 0.5, 0.1, 0.25), TargetState(101.0, 2, 0, 1.0, 0.0, 0.0)]


def record(index: int, scheduled: float, times: list[float]) -> RequestRecord:
    chunks = [Chunk(time, "x", 1) for time in times]
    usage = ReportedUsage(8, 0, len(times))
    return RequestRecord(index, scheduled, scheduled, scheduled, None, times[-1], chunks, usage)


def run(
    samples: list[TargetState] = SAMPLES, memory: MemoryParts | None = MEMORY, meter: KVMeter | None = None
) -> Measurement:
    """Measure two served requests and one that fails after 3 s, on a clock that starts at 100."""
    failed = RequestRecord(2, 101.0, 101.0, 101.0, None, 104.0, failure=RequestFailed("timeout", "no end"))
    records = [record(0, 100.0, [101.0, 101.5, 103.0]), record(1, 100.5, [102.0, 102.25]), failed]
    return measure(RunRecord(records, samples=samples, memory=memory, meter=meter), SyntheticLoad(), Slo(ttft=2.0))


def test_latencies_are_drawn_at_the_time_requests_were_due() -> None:
    chart = latency_over_time(run(), Slo(ttft=2.0, tpot=0.0))
    ttft, tpot, stall, _ = chart.series
    assert ttft.points == [(0.0, 1000.0), (0.5, 1500.0)]
    assert tpot.points == [(0.0, 1000.0), (0.5, 250.0)]
    assert stall.points == [(0.0, 1500.0), (0.5, 250.0)]
    assert chart.limits == (("SLO of TTFT", 2000.0), ("SLO of TPOT", 0.0))


def test_distributions_have_every_sample() -> None:
    by_name = {series.name: series.points for series in run_charts(run(), Slo())[1].series}
    assert by_name["TTFT"] == [(1000.0, 50.0), (1500.0, 100.0)]
    assert [value for value, _ in by_name["ITL"]] == pytest.approx([250.0, 500.0, 1500.0])


def test_requests_in_flight_are_counted_as_the_client_sees_them() -> None:
    answered, waiting = requests_over_time(run()).series
    assert waiting.points == [(0.0, 1), (0.5, 2), (1.0, 2), (2.0, 1), (4.0, 0)]
    assert answered.points == [(1.0, 1), (2.0, 2), (2.25, 1), (3.0, 0), (4.0, 0)]


def test_a_failed_request_counts_as_receiving_from_its_first_token_on() -> None:
    cut = record(0, 100.0, [101.0, 102.0])
    cut.failure = RequestFailed("cut without [DONE]")
    figures = measure(RunRecord([cut, record(1, 100.0, [103.0])]), SyntheticLoad(), Slo())
    answered, waiting = requests_over_time(figures).series
    assert answered.points == [(1.0, 1), (2.0, 0), (3.0, 0)]
    assert waiting.points == [(0.0, 2), (1.0, 1), (3.0, 0)]


def test_failures_are_drawn_and_charts_over_time_share_an_axis() -> None:
    figures = run()
    assert latency_over_time(figures, Slo()).series[-1] == Series("failed after", [(1.0, 3000.0)], "dots")
    over_time = [chart for chart in run_charts(figures, Slo()) if chart.x == "s after the start"]
    assert len(over_time) == 5
    assert {(axes(chart)[0].low, axes(chart)[0].high) for chart in over_time} == {(0.0, figures.duration)}


def test_throughput_adds_up_to_the_tokens() -> None:
    figures = run()
    points = throughput_over_time(figures).series[0].points
    assert points[-1][0] == pytest.approx(figures.duration)
    stretches = pairwise(points)
    assert sum(rate * (end - at) for (at, rate), (end, _) in stretches) == pytest.approx(figures.tokens.output)


def test_throughput_intervals_are_longer_than_the_gaps_between_tokens() -> None:
    """One token per second for 40 s, in intervals with more than one token."""
    steady = record(0, 100.0, [101.0 + n for n in range(40)])
    points = throughput_over_time(measure(RunRecord([steady]), SyntheticLoad(), Slo())).series[0].points
    assert len(points) == 11
    assert all(rate == pytest.approx(1.0, rel=0.26) for _, rate in points)


def test_memory_is_split_and_adds_up_to_what_is_in_use() -> None:
    figures = run()
    chart = memory_over_time(figures.samples, figures.run.memory)
    first = {series.name: series.points[0][1] for series in chart.series}
    assert first == pytest.approx(
        {
            **{"weights": 2, "activations": 1, "KV used": 3.2, "KV reserved, still empty": 0.8},
            "KV cached": 2,
        }
    )
    assert [time for time, _ in chart.series[0].points] == pytest.approx([0.5, 1.0])
    shares = memory_over_time(figures.samples, None)
    assert shares.y == "% of KV memory"
    assert sum(series.points[0][1] for series in shares.series) == pytest.approx(75.0)


@pytest.mark.parametrize(("held", "limits"), [(0.1, ()), (0.9, (("all memory", 11.0),))])
def test_little_memory_in_use_fills_the_chart(held: float, limits: tuple[object, ...]) -> None:
    """All memory is a line in the chart once half of it is in use. An area of free memory would hide the rest."""
    chart = memory_over_time([TargetState(0.5, 1, 0, held), TargetState(1.0, 1, 0, held)], MEMORY)
    assert (chart.title, chart.limits) == ("memory in use, of 11.0 GiB", limits)
    assert axes(chart)[1].high == pytest.approx(11.0 if limits else 3.8)


def test_parts_reported_together_are_drawn_as_one() -> None:
    chart = memory_over_time([TargetState(0.5, 1, 2, kv_held=0.75)], None)
    first = {series.name: series.points[0][1] for series in chart.series}
    assert first == {"KV used or reserved": 75.0}


def test_the_memory_of_a_run_is_in_the_report() -> None:
    experiment = Experiment("m", Provenance("u"), SyntheticLoad(), Slo())
    report = as_json(experiment, run())
    assert report["memory"] == {**MEMORY._asdict(), "mean_kv_share": 0.75, "looks": 2, "steps": None, "kv_tokens": None}
    assert (report["peak_kv_share"], report["peak_kv_bytes"], report["peak_memory_bytes"]) == (1.0, 8 * GIB, 11 * GIB)
    assert report["kv_waste"] == pytest.approx(0.1)
    measured = MeasuredRun(experiment, run())
    rows = dict(totals_table(measured).rows)
    assert (rows["peak KV"], rows["peak memory"]) == ("8.00 GiB, 100.0% of 8.00 GiB", "11.0 GiB")
    assert definitions(measured).keys() >= {"peak KV", "peak memory"}


def test_memory_usage_comes_from_steps_if_there_are_any() -> None:
    meter = KVMeter()
    for use in (KVUsage(40, 10, 0, 100), KVUsage(60, 0, 0, 100), KVUsage(0, 0, 60, 100)):
        meter(use)
    report = as_json(Experiment("m", Provenance("u"), SyntheticLoad(), Slo()), run([], MEMORY, meter))
    assert (report["peak_kv_share"], report["kv_waste"]) == (0.6, 0.125)
    assert report["memory"] == {**MEMORY._asdict(), "mean_kv_share": None, "looks": 0, "steps": 3, "kv_tokens": 100}


def test_unreported_parts_of_memory_are_null() -> None:
    experiment, shares = (
        Experiment("m", Provenance("u"), SyntheticLoad(), Slo()),
        run([TargetState(100.5, 1, 0, kv_held=0.5)], None),
    )
    report = as_json(experiment, shares)
    assert report["memory"] == {"mean_kv_share": 0.5, "looks": 1, "steps": None, "kv_tokens": None}
    assert (report["peak_kv_share"], report["peak_kv_bytes"], report["kv_waste"]) == (0.5, None, None)
    assert dict(totals_table(MeasuredRun(experiment, shares)).rows)["peak KV"] == "50.0% of KV memory"
    assert "peak memory" not in definitions(MeasuredRun(experiment, shares))
    nothing = as_json(experiment, run([TargetState(100.5, 1, 0)], None))
    assert (nothing["memory"], nothing["peak_kv_share"], nothing["peak_memory_bytes"]) == (None, None, None)


def test_the_scheduler_queue_is_drawn_as_reported() -> None:
    running, waiting = queue_over_time(run().samples).series
    assert running.points == [(0.5, 1), (1.0, 2)]
    assert waiting.points == [(0.5, 2), (1.0, 0)]


def test_charts_without_data_are_left_out() -> None:
    assert len(run_charts(run(), Slo())) == 6
    assert len(run_charts(run([TargetState(100.0, 1, 1)], None), Slo())) == 5
    assert len(run_charts(run([], None), Slo())) == 4


def test_a_page_is_complete_and_loads_nothing() -> None:
    figures, experiment = run(), Experiment("<model>", Provenance("in process"), SyntheticLoad(), Slo(ttft=2.0))
    report = as_json(experiment, figures)
    html = result_page(Result(report, run_content(MeasuredRun(experiment, figures)), True, [report]))
    tags = parsed(html)
    assert tags.fetched == []
    assert tags.seen.count("svg") == 6
    assert "MEASURED <model> (in process)" in tags.text
    assert "1 of 3 requests failed: timeout (no end)" in tags.text
    assert "66.7%" in tags.text
    assert "from the moment a request should have been sent" in tags.text
    assert json.loads(tags.text[tags.text.index('{\n "measured"') :].strip())["completed"] == 2


def test_a_page_begins_with_the_verdict_the_main_figures_and_their_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["llmsched", "bench", "http://h:1", "--api-key", "s3cret key", "--report", "run.html"]
    monkeypatch.setattr(sys, "argv", command)
    experiment = Experiment("m", Provenance("http://h:1"), SyntheticLoad(), Slo(ttft=2.0))
    measured = MeasuredRun(experiment, run())
    report = as_json(*measured)
    content = replace(run_content(measured), decisions=["harmless"], warnings=["careful"])
    html = result_page(Result(report, content, True, [report]))
    text = parsed(html).text
    places = [
        text.index(part)
        for part in (content.verdict, "TTFT P99", "measured", "unknown (server http://h:1)", "latency in")
    ]
    assert places == sorted(places)
    assert content.verdict.startswith("1 of 3 requests failed, 0.50 requests/s")
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", text)
    assert f"llmsched {version('llmsched')}" in text
    assert "llmsched bench http://h:1 --api-key KEY --report run.html" in text
    assert "s3cret" not in html
    assert '<p class="note">harmless</p>' in html
    assert '<p class="warning">careful</p>' in html
    assert html.count("<table>") == html.count('<div class="scroll"><table>') == len(content.tables)


def test_definitions_come_last_and_only_if_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "stderr", render.stdout)
    content = run_content(MeasuredRun(Experiment("m", Provenance("u"), SyntheticLoad(), Slo(ttft=2.0)), run()))
    show(content)
    brief = capsys.readouterr().out
    assert "warning: " in brief
    assert "from the moment a request should have been sent" not in brief
    show(content, definitions=True)
    assert capsys.readouterr().out == brief + "".join(f"{term}: {text}\n" for term, text in content.definitions.items())


def test_page_of_a_run_in_which_every_request_failed() -> None:
    failed = [RequestRecord(0, 0.0, failure=RequestFailed("connect", "refused"))]
    experiment, figures = (
        Experiment("u", Provenance("u"), SyntheticLoad(), Slo()),
        measure(RunRecord(failed), SyntheticLoad(), Slo()),
    )
    report = as_json(experiment, figures)
    tags = parsed(result_page(Result(report, run_content(MeasuredRun(experiment, figures)), False, [report])))
    assert tags.seen.count("svg") == 0
    assert "1 of 1 requests failed: connect (refused)" in tags.text
