"""One entry in the registry is all that a new figure needs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from llmsched.cli.bench.compare.comparison import VariantResult
from llmsched.cli.bench.compare.comparison_report import comparison_content, comparison_json
from llmsched.cli.bench.report.csv_report import append_csv, csv_columns
from llmsched.cli.bench.report.report_content import Result, result_page
from llmsched.cli.bench.report.run_report import run_content, totals_table
from llmsched.cli.figures import registry
from llmsched.cli.figures.experiment import Experiment, MeasuredRun
from llmsched.cli.figures.kv_memory import KVMeter
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import Chunk, RequestRecord, RunRecord
from llmsched.cli.figures.registry import FIGURES, Figure, Place, as_json
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.provenance import Provenance

LONGEST = Figure(
    "longest_answer",
    "count",
    lambda _, figures: max(len(record.chunks) for record in figures.run.records),
    Place.JSON | Place.TOTALS | Place.CSV | Place.RATIOS,
    label="longest answer",
    definition={"longest answer": "the most chunks of one answer"},
)


def run_of(chunks: int) -> MeasuredRun:
    record = RequestRecord(0, 0.0, 0.0, 0.0, None, 9.0, [Chunk(1.0 + index, "x", 1) for index in range(chunks)])
    run = RunRecord([record], memory=MemoryParts(1, 1, 1, 1), meter=KVMeter(steps=1, peak=1, total=2))
    experiment = Experiment("m", Provenance("u"), SyntheticLoad(num_prompts=1), Slo(ttft=2.0))
    return MeasuredRun(experiment, measure(run, experiment.workload, experiment.slo))


@pytest.fixture(autouse=True)
def longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FIGURES", (*FIGURES, LONGEST))


def test_a_new_figure_is_in_json_table_and_page() -> None:
    run = run_of(3)
    report = as_json(*run)
    assert report["longest_answer"] == 3
    assert report["definitions"]["longest answer"] == "the most chunks of one answer"
    assert ["longest answer", "3"] in totals_table(run).rows
    page = result_page(Result(report, run_content(run), True, [report]))
    assert '<td class="text">longest answer</td><td>3</td>' in page
    assert "<dt>longest answer</dt><dd>the most chunks of one answer</dd>" in page


def test_a_new_figure_is_a_column_of_csv(tmp_path: Path) -> None:
    assert "longest_answer" in csv_columns()
    append_csv(tmp_path / "runs.csv", [as_json(*run_of(3))])
    with (tmp_path / "runs.csv").open(newline="") as file:
        assert [row["longest_answer"] for row in csv.DictReader(file)] == ["3"]


def test_a_new_figure_is_compared() -> None:
    variants = [
        VariantResult(name, run.experiment, run.figures, (run.figures,))
        for name, run in (("a", run_of(2)), ("b", run_of(3)))
    ]
    document = comparison_json(variants)
    assert document["ratios"]["b"]["longest_answer"] == 1.5
    content = comparison_content(document, variants)
    assert ["longest answer", "2", "3", "1.5x"] in content.tables[0].rows
    assert "longest answer" in content.definitions


def test_names_of_figures_are_unique() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
