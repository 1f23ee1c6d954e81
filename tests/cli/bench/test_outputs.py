"""Files that a bench writes: CSV, detailed requests, and the timeline of one of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from fake_server import FakeServer, Script, event, steady, token
from measured_load import measure_load
from virtual_time import run_virtual

from llmsched.cli.bench.report.csv_report import append_csv, csv_columns
from llmsched.cli.bench.report.detailed_file import detailed_lines
from llmsched.cli.figures.experiment import Experiment, MeasuredRun
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestRecord, RunRecord
from llmsched.cli.figures.registry import as_json
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.options.slo_flags import parse_itl_target
from llmsched.engine.core import Timeline
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.provenance import Provenance
from llmsched.engine.scheduler.ledger import Entry

WORK = SyntheticLoad(num_prompts=3, input_len=8, output_len=5, request_rate=10.0, arrivals="constant")
SLO = Slo(ttft=0.5, itl=0.15, itl_statistic="max")
METRICS = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"


def measured() -> Measurement:
    """Three requests, sent every 0.1 s: a good one, one that stalls for 2 s, one that fails after a token."""
    stalled = [(0.4, token()), (0.5, token()), (2.5, token() * 3 + b"data: [DONE]\n\n")]
    scripts = [
        steady(5, 0.4, 0.1),
        Script(stalled, connect=0.2),
        Script([(0.3, token()), (0.6, event({"error": {"message": "boom"}}))]),
    ]
    server = FakeServer(lambda number: scripts[number], metrics=lambda: METRICS)
    return run_virtual(measure_load("http://fake", WORK, SLO, transport=server, timeout=9.0))


def measured_run(figures: Measurement, slo: Slo = SLO) -> MeasuredRun:
    return MeasuredRun(Experiment("m", Provenance("http://fake"), WORK, slo), figures)


def report_of(figures: Measurement, slo: Slo = SLO) -> dict[str, Any]:
    return as_json(Experiment("m", Provenance("http://fake"), WORK, slo), figures)


def saved(tmp_path: Path, figures: Measurement) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(detailed_lines(report_of(figures), measured_run(figures))))
    return path


def test_csv_has_a_row_per_run_below_one_header(tmp_path: Path) -> None:
    path, report = tmp_path / "runs.csv", report_of(measured())
    append_csv(path, [report])
    append_csv(path, [report, report])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert rows[0] == rows[1] == rows[2]
    row = rows[0]
    assert (row["completed"], row["failed"], row["measured"]) == ("2", "1", "true")
    assert float(row["ttft_ms.p99"]) == report["ttft_ms"]["p99"]
    assert float(row["slo.ttft_ms"]) == 500.0
    assert row["slo.itl_statistic"] == "max"
    assert json.loads(row["failures"]) == {"error event": 1}
    assert json.loads(row["workload"]) == report["workload"]


def test_csv_distinguishes_zero_from_unknown(tmp_path: Path) -> None:
    """A goodput of 0.0 is written as 0.0, one that was not asked for is an empty cell."""
    path, figures = tmp_path / "runs.csv", measured()
    append_csv(path, [report_of(figures)])
    without = report_of(figures, Slo())
    without["goodput_rps"] = None
    append_csv(path, [{**report_of(figures), "goodput_rps": 0.0, "attainment": {"all": 0.0}}, without])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["goodput_rps"] for row in rows[1:]] == ["0.0", ""]
    assert [row["attainment.all"] for row in rows[1:2]] == ["0.0"]
    assert rows[2]["slo.ttft_ms"] == rows[2]["preemptions"] == ""


def test_every_column_is_in_the_report_of_some_run() -> None:
    report = report_of(measured(), Slo(1.0, 1.0, 1.0, 1.0))
    for column in csv_columns():
        value: Any = report
        for name in column.split("."):
            assert value is None or name in value or column.startswith("attainment."), column
            value = None if value is None else value.get(name)


def test_csv_with_other_columns_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(LlmschedError, match="other columns"):
        append_csv(path, [report_of(measured())])
    assert path.read_text() == "a,b\n1,2\n"


def test_detailed_lines_are_exact_to_the_microsecond() -> None:
    chunks = [Chunk(101.1234567, "x", 1), Chunk(101.2345678, "x", 1)]
    record = RequestRecord(0, 100.0, 100.0, 100.0, end=101.3, chunks=chunks, usage=ReportedUsage(8, 3, 2))
    figures = measure(RunRecord([record]), WORK, SLO)
    request = json.loads(list(detailed_lines(report_of(figures), measured_run(figures)))[1])
    assert request["chunks"] == [[1.123457, 1], [1.234568, 1]]
    assert (request["ttft_ms"], request["itl_ms"]) == (1123.457, [111.111])
    assert [request[f"{name}_tokens"] for name in ("prompt", "cached", "output")] == [8, 3, 2]


def test_detailed_lines_hold_every_request_and_every_sample(tmp_path: Path) -> None:
    figures = measured()
    run, *others = [json.loads(line) for line in saved(tmp_path, figures).read_text().splitlines()]
    assert run["report"]["completed"] == 2
    requests = [line for line in others if line["kind"] == "request"]
    assert [request["index"] for request in requests] == [0, 1, 2]
    good, stalled, failed = requests
    assert good["chunks"] == [[0.4, 1], [0.5, 1], [0.6, 1], [0.7, 1], [0.8, 1]]
    assert (good["ttft_ms"], good["e2e_ms"], good["tpot_ms"]) == (400.0, 800.0, 100.0)
    assert good["itl_ms"] == [100.0] * 4
    assert good["met"] == {"ttft": True, "itl": True}
    assert [stalled[f"{name}_s"] for name in ("scheduled", "connecting", "connected", "sent")] == [0.1, 0.1, 0.3, 0.3]
    assert stalled["met"] == {"ttft": False, "itl": False}
    assert failed["failure"] == {"reason": "error event", "detail": failed["failure"]["detail"]}
    assert "boom" in failed["failure"]["detail"]
    assert failed["chunks"] == [[0.5, None]]
    assert failed["ttft_ms"] is failed["met"] is failed["decisions"] is None
    samples = [line for line in others if line["kind"] == "sample"]
    assert [sample["time"] for sample in samples] == [1.0, 2.0]
    assert samples[0] == {
        **{"kind": "sample", "time": 1.0, "running": 2, "waiting": 1},
        **{"kv_held": None, "kv_empty": None, "kv_cached": None},
    }


def test_the_timeline_of_a_request_that_stalled(command: CommandLine, tmp_path: Path) -> None:
    path = saved(tmp_path, measured())
    outcome = command("explain", "1", "--file", str(path))
    assert outcome.code == 0
    title, _, *rows = outcome.out.splitlines()
    assert title.strip() == "request 1: first token after 600 ms, last of 5 after 2.70 s"
    told = [" ".join(row.split()) for row in rows]
    assert told == [
        "0.0 due",
        "0.0 to 200.0 connected",
        "200.0 sent",
        "600.0 first token",
        "700.0 to 2700.0 longest stall 2.00 s without a token",
        "2700.0 last token",
        "2700.0 complete 5 tokens",
    ]
    assert "did not report its scheduler's decisions" in outcome.err
    assert "failed error event:" in " ".join(command("explain", "2", "--file", str(path)).out.split())


def test_decisions_count_from_when_the_request_was_due(command: CommandLine, tmp_path: Path) -> None:
    figures = measured()
    record = figures.run.records[0]
    record.request_id = "bench-7"
    entries = [
        Entry(0.05, "queued", {"ahead": 2, "running": 1}, 0.15),
        Entry(0.3, "admitted", {"running": 1, "cached_tokens": 0, "tokens": 8}, 0.3),
        Entry(0.8, "finished", {"reason": "length", "output_tokens": 5}, 0.8),
    ]
    record.timeline = Timeline(0, 0.05, entries)
    path = saved(tmp_path, figures)
    rows = [" ".join(row.split()) for row in command("explain", "bench-7", "--file", str(path)).out.splitlines()]
    assert rows[0] == "request 0 (bench-7): waited 250 ms, ended (length) after 750 ms with 5 tokens"
    assert "50.0 to 150.0 queued 2 waiting, 1 running" in rows
    assert "300.0 admitted 0 of 8 tokens cached, 1 running" in rows
    document = command("explain", "bench-7", "--file", str(path), "--json").json
    assert document["decisions"][0]["at_ms"] == 0.0
    assert document["entries"][2]["at_ms"] == 50.0
    assert document["arrived_s"] == 0.05


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"kind":"run","format":"llmsched bench detailed 1"}\n', "has no request '1'"),
        (b'{"completed": 3}\n', "was not written by bench --save-detailed"),
        (b"[]\n", "was not written by bench --save-detailed"),
        (b"\xff\xfe", "was not written by bench --save-detailed"),
        (b'{"kind":"run","format":"llmsched bench detailed 1"}\n{"kind":"request","index":1}\n', "is damaged"),
        (b'{"kind":"run","format":"llmsched bench detailed 1"}\n{"kind', "was not written by bench --save-detailed"),
    ],
)
def test_an_invalid_file_is_reported_in_one_line(
    command: CommandLine, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert message in command.refused("explain", "1", "--file", str(path))


def test_a_missing_file_and_two_sources_are_refused(command: CommandLine, tmp_path: Path) -> None:
    missing = ("explain", "1", "--file", str(tmp_path / "none"))
    assert "No such file" in command.refused(*missing)
    assert "do not go together" in command.refused(*missing, "--url", "http://x")


@pytest.mark.parametrize("flag", ["--save", "--csv", "--save-detailed", "--report"])
def test_files_that_cannot_be_written_are_refused_before_the_run(
    command: CommandLine, tmp_path: Path, flag: str
) -> None:
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "none" / "f", "has no directory")):
        assert f"{flag} {path}: {why}" in command.refused("bench", "http://127.0.0.1:9", flag, str(path))


def test_files_that_cannot_be_wanted_together_are_refused(command: CommandLine, tmp_path: Path) -> None:
    bench, path = ("bench", "http://127.0.0.1:9"), str(tmp_path / "f")
    assert "works only with a single run" in command.refused(*bench, "--save-detailed", path, "--find-knee")
    twice = command.refused(*bench, "--save", path, "--csv", f"{tmp_path}/./f")
    assert "--save, --csv: two of these flags name the same file" in twice


def test_the_report_is_printed_if_a_file_cannot_be_written_at_the_end(command: CommandLine) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device that is full")
    outcome = command("bench", "http://127.0.0.1:9", "--num-prompts", "2", "--save", "/dev/full", "--json")
    assert outcome.code == 2
    assert outcome.json["failures"] == {"connect": 2}
    assert "--save /dev/full: No space left on device" in outcome.err


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("50ms", Slo(itl=0.05, itl_statistic="p99")),
        ("p99:50ms", Slo(itl=0.05, itl_statistic="p99")),
        ("p99.9:1s", Slo(itl=1.0, itl_statistic="p99.9")),
        ("mean:30ms", Slo(itl=0.03, itl_statistic="mean")),
        ("max:1s", Slo(itl=1.0, itl_statistic="max")),
    ],
)
def test_the_target_of_itl_names_its_statistic(text: str, target: Slo) -> None:
    assert parse_itl_target(text) == target
