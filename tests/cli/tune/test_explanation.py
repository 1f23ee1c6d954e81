"""The sentences that explain a choice."""

from __future__ import annotations

from scripted_trials import FAULT_18, A, B, C, D, E, Scripted, figures, raced
from simulated_machine import made_run, winner

from llmsched.cli.tune.explanation import explain
from llmsched.cli.tune.preference import best_trial, nearest_miss
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.engine.goodput import Slo


def test_explanation_if_no_setting_is_feasible() -> None:
    history = raced(Scripted({setting: FAULT_18[setting] for setting in (B, C, D)}))
    assert best_trial(history) is None
    nearest = nearest_miss(history)
    assert nearest is not None
    assert nearest.setting == D
    assert explain(history) == (
        "none of the 3 settings meets the SLOs; the nearest is max_num_batched_tokens 256: P99 TTFT 3,000 ms is "
        "above 1000 ms; relax the SLOs or lower the load"
    )
    broken = raced(Scripted({setting: FAULT_18[setting] for setting in (B, C)}))
    assert nearest_miss(broken) is None
    assert explain(broken) == "none of the 2 settings works; see the reasons"


def test_explanation_of_a_single_setting() -> None:
    alone = raced(Scripted({A: lambda n: figures(1.2)}))
    assert explain(alone).endswith("tokens/s; the only setting tried meets the SLOs")
    assert explain(raced(Scripted({A: lambda n: figures(1.2)}), slo=Slo())).endswith("tried works (no SLO was given)")
    late = raced(Scripted({D: lambda n: figures(5, ttft=3.0)}))
    assert explain(late).startswith(
        "the only setting tried, max_num_batched_tokens 256, misses an SLO: P99 TTFT 3,000 ms is"
    )
    of_two = raced(Scripted({A: lambda n: figures(1.2), B: lambda n: figures(0.5, ttft=3.0)}))
    assert explain(of_two).endswith("tokens/s; it is the only one of 2 settings that meets the SLOs")


def test_explanation_of_a_tie() -> None:
    history = raced(Scripted({A: lambda n: figures(1.2), E: lambda n: figures(1.21)}), rounds=3, slo=Slo())
    first = history.trials()[0]
    assert explain(history) == (
        f"max_num_batched_tokens 32: {first.output_tokens_per_s:.1f} tokens/s is within the noise (2%) of the highest "
        "(max_num_batched_tokens 512); 2 of 2 settings work (no SLO was given)"
    )


def test_explanation_names_a_faster_setting_that_missed_an_slo() -> None:
    history = raced(Scripted({A: lambda n: figures(1.2), D: lambda n: figures(5, ttft=3.0)}))
    best, fast = (trial.output_tokens_per_s for trial in history.trials())
    assert best is not None
    assert fast is not None
    assert explain(history).endswith(
        f"; max_num_batched_tokens 256 gave {fast / best - 1:.0%} more tokens/s, but its P99 TTFT 3,000 ms is above "
        "1000 ms"
    )


def test_explanation_compares_runs_of_the_same_length() -> None:
    """A and C ran in full. B, in short runs only, was ahead of both; D was slower than A in the same round."""
    history = TrialHistory(Slo(itl=0.1), "throughput", A)
    for run in (made_run(A, 8, 0, 50.0), made_run(B, 8, 0, 60.0), made_run(C, 8, 0, 40.0)):
        history.add(run)
    for run in (made_run(D, 8, 0, 45.0, itl=0.5), made_run(A, 32, 1, 20.0), made_run(C, 32, 1, 16.0)):
        history.add(run)
    assert explain(history) == (
        "max_num_batched_tokens 32: 20.0 tokens/s is the highest of the 2 settings that had full runs; 3 of 4 settings "
        "meet the SLOs"
    )


def test_explanation_of_exact_runs_does_not_mention_noise() -> None:
    history = TrialHistory(Slo(itl=0.1), "throughput", A, exact=True)
    history.add(made_run(A, 8, 0, 99.0))
    history.add(made_run(B, 8, 0, 100.0))
    assert explain(history).endswith(
        "99.0 tokens/s is within 2% of the highest (max_num_batched_tokens 64); 2 of 2 settings meet the SLOs"
    )
    history.add(made_run(C, 8, 0, 103.0))
    assert winner(history) == C
