"""`bench --against`: which figures are worse than in a saved run of the same load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine
from configs import CONFIGS

from llmsched.cli.bench.report.run_against import compare_runs, judge, wilson_interval
from llmsched.cli.figures.latency_distributions import mean_interval
from llmsched.cli.figures.throughput import rate_interval
from llmsched.engine.request_latency import Arrival

MODEL = str(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json")
LOAD = ("--request-rate", "10", "--num-prompts", "60", "--input-len", "300", "--output-len", "40")


@pytest.mark.parametrize(
    ("now", "tolerance", "lower_is_better", "verdict"),
    [
        ((11.0, 13.0), 0.0, True, "same"),
        ((12.1, 13.0), 0.0, True, "worse"),
        ((12.1, 13.0), 0.0, False, "better"),
        ((12.1, 13.0), 0.05, True, "same"),
        ((12.7, 13.0), 0.05, True, "worse"),
        ((7.0, 9.9), 0.0, True, "better"),
        ((7.0, 9.9), 0.0, False, "worse"),
        ((7.0, 9.6), 0.05, True, "same"),
    ],
)
def test_only_intervals_that_lie_apart_count(
    now: tuple[float, float], tolerance: float, lower_is_better: bool, verdict: str
) -> None:
    assert judge((10.0, 12.0), now, tolerance, lower_is_better) == verdict


def test_the_interval_of_a_share() -> None:
    """Example of Wilson's interval for 10 of 100."""
    assert wilson_interval(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-3)
    assert wilson_interval(0, 50)[0] == 0.0


def test_the_interval_of_a_mean_covers_the_mean() -> None:
    """95 % of the intervals contain the true mean, although the gaps of one request are alike."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        speeds = generator.exponential(1.0, 80)
        requests = [tuple(speed + generator.normal(0, 0.1, generator.integers(5, 15))) for speed in speeds]
        low, high = mean_interval(requests) or (0.0, 0.0)
        covered += low <= 1.0 <= high
    assert 0.90 <= covered / 400 <= 0.98
    assert mean_interval([(1.0, 2.0)]) is None


def test_the_interval_of_a_rate() -> None:
    even = [Arrival(0.1 * n, 2) for n in range(100)]
    assert rate_interval(even, (0.0, 10.0)) == pytest.approx((20.0, 20.0))
    low, high = rate_interval([Arrival(time, 2) for time in (0.5, 1.5, 9.5)], (0.0, 10.0)) or (0.0, 0.0)
    assert low < 0.6 < high
    assert rate_interval(even, (3.0, 3.0)) is None


def verdicts(answer: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["verdict"] for one in answer["against"]}


def test_a_regression_gives_exit_code_1(command: CommandLine, tmp_path: Path) -> None:
    saved, run = str(tmp_path / "h100.json"), ("bench", MODEL, "--simulate")
    assert command(*run, "h100", *LOAD, "--save", saved, "--slo-ttft", "50ms").code == 0
    outcome = command(*run, "h100", *LOAD, "--against", saved, "--slo-ttft", "50ms")
    assert outcome.code == 0
    assert outcome.out.rstrip().endswith("same as the saved run, within the confidence intervals")
    outcome = command(*run, "l40s", *LOAD, "--against", saved, "--slo-ttft", "50ms", "--json")
    assert outcome.code == 1
    found = verdicts(outcome.json)
    assert found["ITL mean"] == found["TTFT mean"] == found["share of requests that met every SLO"] == "worse"
    assert found["share of requests that failed"] == "same"
    outcome = command(*run, "l40s", *LOAD, "--against", saved)
    assert outcome.code == 1
    assert outcome.out.splitlines()[-1].startswith("WORSE than the saved run: TTFT mean, ")
    outcome = command(*run, "l40s", *LOAD, "--against", saved, "--tolerance", "1")
    assert "TTFT mean" in outcome.out


def test_what_cannot_be_compared_is_refused(command: CommandLine, tmp_path: Path) -> None:
    saved, run = str(tmp_path / "run.json"), ("bench", MODEL, "--simulate", "h100", *LOAD)
    command(*run, "--save", saved)
    told = command.refused(*run, "--input-len", "400", "--against", saved)
    assert "the saved run had another load (input_len 300 -> 400)" in told
    report = json.loads(Path(saved).read_text())
    with_measured = str(tmp_path / "measured.json")
    Path(with_measured).write_text(json.dumps(report | {"measured": True}))
    assert "was measured and this run is simulated" in command.refused(*run, "--against", with_measured)
    several = str(tmp_path / "several.json")
    command(*run, "--compare", "fair,fcfs", "--rounds", "1", "--save", several)
    assert "is a report of bench --compare" in command.refused(*run, "--against", several)
    assert "--against works only with a single run" in command.refused(*run, "--find-knee", "--against", saved)
    assert "--tolerance 0.1: must be a share" in command.refused(*run, "--tolerance", "10%")
    assert "is the file of --against" in command.refused(*run, "--save", saved, "--against", saved)
    assert "No such file" in command.refused(*run, "--against", str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("{")
    assert "was not written by bench --save" in command.refused(*run, "--against", str(tmp_path / "text.json"))


def test_figures_without_an_interval_get_no_verdict(command: CommandLine, tmp_path: Path) -> None:
    saved = tmp_path / "run.json"
    command("bench", MODEL, "--simulate", "h100", *LOAD, "--save", str(saved))
    report = json.loads(saved.read_text())
    single = {**report, "ttft_ms": report["ttft_ms"] | {"p99_ci95": None}}
    found = {one.name: one.verdict for one in compare_runs(report, single, 0.05)}
    assert found["TTFT P99"] is None
    assert found["ITL P99"] == "same"
