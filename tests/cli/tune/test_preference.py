"""Which setting wins, and which comes nearest."""

from __future__ import annotations

import pytest
from scripted_trials import FAULT_18, SLO, A, B, C, Scripted, figures, raced
from simulated_machine import made_run, winner

from llmsched.cli.tune.explanation import explain
from llmsched.cli.tune.preference import nearest_miss, relative_scores
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import Goal, failed_run
from llmsched.engine.goodput import Slo


@pytest.mark.parametrize("goal", ["throughput", "goodput"])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("lengths", [(10,), (3, 5, 10)])
def test_a_wins_and_every_other_has_its_reason(goal: Goal, rounds: int, lengths: tuple[int, ...]) -> None:
    history = raced(Scripted(FAULT_18), rounds=rounds, goal=goal, lengths=lengths)
    assert winner(history) == A
    assert [trial.reason for trial in history.trials()] == [
        None,
        "10 of 10 requests failed: empty stream (the request ended without a token)",
        "MemoryError: CUDA out of memory. Tried to allocate 20 GiB",
        "P99 TTFT 3,000 ms is above 1000 ms",
        None,
    ]


def test_the_nearest_miss_is_the_least_one() -> None:
    history = raced(Scripted({A: lambda n: figures(1, gap=0.9), B: lambda n: figures(1, ttft=1.3)}))
    nearest = nearest_miss(history)
    assert nearest is not None
    assert nearest.setting == B
    assert nearest.miss == pytest.approx(1.3)


def test_a_limit_that_nothing_meets_has_a_nearest_miss_too() -> None:
    history = raced(Scripted({A: lambda n: figures(1, ttft=0.3), B: lambda n: figures(1, ttft=0.2)}), slo=Slo(ttft=0))
    nearest = nearest_miss(history)
    assert nearest is not None
    assert nearest.setting == B


def test_more_throughput_beyond_the_noise_wins() -> None:
    history = raced(Scripted({A: lambda n: figures(1.0), B: lambda n: figures(1.2), C: lambda n: figures(1.1)}))
    assert winner(history) == B
    assert explain(history).endswith("is the highest; 3 of 3 settings meet the SLOs")


def test_goodput_and_throughput_can_disagree() -> None:
    """B makes more tokens, but a third of its requests miss the ITL SLO, which applies to each request's median."""
    slo, fast = Slo(itl=0.2, itl_statistic="p50"), made_run(B, 30, 0, 12.0, met={"itl": 20, "all": 20})
    for goal, expected in (("throughput", B), ("goodput", A)):
        history = TrialHistory(slo, goal, A)  # type: ignore[arg-type]
        history.add(made_run(A, 30, 0, 10.0))
        history.add(fast)
        assert winner(history) == expected
    assert fast.goodput_rps == pytest.approx(12.0 / 10 * 20 / 30)
    assert TrialHistory(Slo(), "goodput", A).goal == "throughput"


def test_a_short_run_is_no_contender_where_others_ran_longer() -> None:
    history = TrialHistory(SLO, "throughput", A)
    history.add(made_run(A, 8, 0, 99.0))
    history.add(made_run(B, 8, 0, 9.0))
    history.add(made_run(B, 32, 1, 9.0))
    assert winner(history) == B


def test_a_setting_that_broke_is_not_a_near_miss() -> None:
    history = TrialHistory(SLO, "throughput", A)
    history.add(made_run(A, 8, 0, 20.0))
    history.add(failed_run(A, 1, 8, MemoryError("no room")))
    assert history.trial(A).reason == "MemoryError: no room"
    assert nearest_miss(history) is None


def test_relative_scores_are_of_the_same_rounds() -> None:
    """C ran in a slow round only, so its rate is half of what it would be in the others' rounds."""
    history = TrialHistory(SLO, "throughput", A)
    for run in (made_run(A, 8, 0, 100.0), made_run(B, 8, 0, 80.0), made_run(A, 8, 1, 50.0), made_run(C, 8, 1, 45.0)):
        history.add(run)
    assert relative_scores(history) == {A: 1.0, B: pytest.approx(0.8), C: pytest.approx(0.9)}
    assert relative_scores(TrialHistory(SLO, "throughput", A)) == {}
