"""What runs say of a setting together."""

from __future__ import annotations

import pytest
from scripted_trials import SLO, WORK, A, B, Scripted, figures, out_of_memory, raced
from simulated_machine import made_run, winner

from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord, RunRecord
from llmsched.cli.tune.preference import missed_trials, nearest_miss
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import run_of
from llmsched.cli.tune.trials import Trial, judge
from llmsched.engine.goodput import Slo


def test_a_missed_itl_and_a_partly_failed_run_are_infeasible() -> None:
    def half(round_index: int) -> Measurement:
        records = [RequestRecord(0, 0.0, 0.0, 0.0, None, 1.0, [Chunk(1.0, "x", 1)], ReportedUsage(8, 0, 1))]
        broken = RequestRecord(1, 0.0, 0.0, 0.0, None, 1.0, failure=RequestFailed("timeout", "no end after 5 s"))
        return measure(RunRecord([*records, broken]), WORK, SLO)

    history = raced(Scripted({A: lambda n: figures(1, gap=0.25), B: half}))
    assert [trial.reason for trial in history.trials()] == [
        "P99 ITL 250 ms is above 200 ms",
        "1 of 2 requests failed: timeout (no end after 5 s)",
    ]


def test_the_statistic_of_the_slo_is_the_one_that_counts() -> None:
    """Every tenth gap is long: the median meets the SLO, the P99 misses it."""
    run = made_run(A, 10, 0, 5.0)
    gaps = sorted([0.1] * 81 + [0.5] * 9)
    run.samples["itl"] = type(run.samples["itl"])(tuple(gaps), 1, sum(gaps), 0.5)  # type: ignore[index]
    assert judge(A, [run], Slo(itl=0.2)).reason == "P99 ITL 500 ms is above 200 ms"
    assert judge(A, [run], Slo(itl=0.2, itl_statistic="p50")).feasible
    assert judge(A, [run], Slo(itl=0.2, itl_statistic="p95")).reason == "P95 ITL 500 ms is above 200 ms"
    assert judge(A, [run], Slo(itl=0.13, itl_statistic="mean")).reason == "mean ITL 140 ms is above 130 ms"
    assert judge(A, [run], Slo(itl=0.2, itl_statistic="max")).reason == "max ITL 500 ms is above 200 ms"


def test_percentiles_are_of_all_runs_together() -> None:
    """One run of two is slow: half of all samples are its own, so the P99 is too."""
    history = TrialHistory(Slo(), "throughput", A)
    for index in range(2):
        history.add(run_of(A, index, 10, figures(1.0, ttft=0.1 + 0.5 * index)))
    trial: Trial = history.trial(A)
    assert trial.p99["ttft"] == pytest.approx(0.6)
    assert trial.rounds == 2


def test_spread_of_the_runs() -> None:
    """99 tokens in 9.4 s (10.5 a second) and in 8.49 s (11.7 a second): half the range is 5.1 % of the mean."""
    rates = [run_of(A, index, 10, figures(1.0 + 0.1 * index)) for index in range(2)]
    assert judge(A, rates, Slo()).spread == pytest.approx(0.051, abs=0.001)
    assert judge(A, rates[:1], Slo()).spread == 0.0


def test_capacity_is_not_taken_from_the_ramp() -> None:
    """Four tokens, at 10.0, 10.5, 11.0 and 11.5 s, are 2 a second."""

    def slow_start(round_index: int) -> Measurement:
        records = [
            RequestRecord(n, 0.0, 0.0, 0.0, None, end, [Chunk(end, "x", 1)], ReportedUsage(8, 0, 1))
            for n, end in enumerate([10.0, 10.5, 11.0, 11.5])
        ]
        return measure(RunRecord(records), WORK, SLO)

    history = raced(Scripted({A: slow_start}), slo=Slo())
    assert history.trials()[0].output_tokens_per_s == pytest.approx(2.0)


def test_a_setting_is_judged_by_its_longest_runs() -> None:
    """Short runs serve another load: they give no P99 and no nearest miss."""
    history = TrialHistory(Slo(itl=0.1), "throughput", A)
    for run in (made_run(A, 8, 0, 20.0, itl=0.05), made_run(A, 32, 1, 10.0, itl=0.5), made_run(B, 8, 0, 20.0, itl=0.2)):
        history.add(run)
    trial = history.trial(A)
    assert (trial.p99["itl"], trial.output_tokens_per_s, trial.completed) == (0.5, 10.0, 32)
    assert (trial.rounds, trial.longest_run) == (2, 32)
    assert [missed.setting for missed in missed_trials(history)] == [B, A]
    assert nearest_miss(history) == trial


def test_a_setting_that_breaks_in_a_later_round_is_infeasible() -> None:
    def later(round_index: int) -> Measurement:
        return out_of_memory(round_index) if round_index else figures(1.05)

    history = raced(Scripted({A: lambda n: figures(1.0), B: later}), rounds=2)
    assert winner(history) == A
    reason = history.trials()[1].reason
    assert reason is not None
    assert reason.startswith("MemoryError")
