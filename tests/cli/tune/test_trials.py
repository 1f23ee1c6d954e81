"""F18: which setting wins, and why the others do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest
from simulated_machine import made_run, winner

from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, ReportedUsage, RequestFailed, RequestRecord, RunRecord
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.tune.explanation import explain
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.preference import best_trial, missed_trials, nearest_miss, relative_scores
from llmsched.cli.tune.race import Race
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import Goal, TrialRun, failed_run, run_of
from llmsched.cli.tune.trials import Trial, judge
from llmsched.engine.goodput import Slo

SLO = Slo(ttft=1.0, itl=0.2)
A, B, C, D, E = (Setting(tokens, 8) for tokens in (32, 64, 128, 256, 512))
WORK = SyntheticLoad(num_prompts=10, max_concurrency=1)


def figures(rate: float, ttft: float = 0.1, tokens: int = 11, gap: float = 0.05) -> Measurement:
    """Measure ten requests, one every 1/rate seconds, each with `tokens` tokens."""
    records = []
    for index in range(10):
        start = index / rate
        chunks = [Chunk(start + ttft + gap * number, "x", 1) for number in range(tokens)]
        end = start + 1 / rate
        failure = None if tokens else RequestFailed("empty stream", "the request ended without a token")
        usage = ReportedUsage(8, 0, tokens)
        records.append(RequestRecord(index, start, start, start, None, end, chunks, usage, failure))
    return measure(RunRecord(records), WORK, SLO)


class Scripted:
    """TrialRunner with scripted measurements."""

    def __init__(self, outcomes: dict[Setting, Callable[[int], Measurement]]) -> None:
        self.outcomes = outcomes
        self.log: list[tuple[Setting, int]] = []

    async def run(self, setting: Setting, requests: int, round_index: int, rate: float | None = None) -> TrialRun:
        self.log.append((setting, round_index))
        return run_of(setting, round_index, requests, self.outcomes[setting](round_index))

    def predict(
        self, settings: Sequence[Setting], requests: int, rate: float | None = None
    ) -> Mapping[Setting, TrialRun]:
        return {}


def raced(
    runner: Scripted, *, rounds: int = 1, goal: Goal = "throughput", lengths: tuple[int, ...] = (10,), slo: Slo = SLO
) -> TrialHistory:
    history = TrialHistory(slo, goal, A)

    async def main() -> None:
        race = Race(runner, history, lengths, rounds)
        await race.qualify("all", list(runner.outcomes))
        await race.final()

    asyncio.run(main())
    return history


def out_of_memory(round_index: int) -> Measurement:
    raise MemoryError("CUDA out of memory.\nTried to allocate 20 GiB")


FAULT_18: dict[Setting, Callable[[int], Measurement]] = {
    A: lambda n: figures(1.2),
    B: lambda n: figures(12, tokens=0),
    C: out_of_memory,
    D: lambda n: figures(5, ttft=3.0),
    E: lambda n: figures(1.21),
}


@pytest.mark.parametrize("goal", ["throughput", "goodput"])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("lengths", [(10,), (3, 5, 10)])
def test_a_wins_and_every_other_has_its_reason(goal: Goal, rounds: int, lengths: tuple[int, ...]) -> None:
    """F18."""
    history = raced(Scripted(FAULT_18), rounds=rounds, goal=goal, lengths=lengths)
    assert winner(history) == A
    assert [trial.reason for trial in history.trials()] == [
        None,
        "10 of 10 requests failed: empty stream (the request ended without a token)",
        "MemoryError: CUDA out of memory. Tried to allocate 20 GiB",
        "P99 TTFT 3,000 ms is above 1000 ms",
        None,
    ]


def test_explanation_if_no_setting_is_feasible() -> None:
    """F18, F19."""
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


def test_a_setting_that_breaks_in_a_later_round_is_infeasible() -> None:
    def later(round_index: int) -> Measurement:
        return out_of_memory(round_index) if round_index else figures(1.05)

    history = raced(Scripted({A: lambda n: figures(1.0), B: later}), rounds=2)
    assert winner(history) == A
    reason = history.trials()[1].reason
    assert reason is not None
    assert reason.startswith("MemoryError")


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
    """F12: four tokens, at 10.0, 10.5, 11.0 and 11.5 s, are 2 a second."""

    def slow_start(round_index: int) -> Measurement:
        records = [
            RequestRecord(n, 0.0, 0.0, 0.0, None, end, [Chunk(end, "x", 1)], ReportedUsage(8, 0, 1))
            for n, end in enumerate([10.0, 10.5, 11.0, 11.5])
        ]
        return measure(RunRecord(records), WORK, SLO)

    history = raced(Scripted({A: slow_start}), slo=Slo())
    assert history.trials()[0].output_tokens_per_s == pytest.approx(2.0)


def test_a_short_run_is_no_contender_where_others_ran_longer() -> None:
    history = TrialHistory(SLO, "throughput", A)
    history.add(made_run(A, 8, 0, 99.0))
    history.add(made_run(B, 8, 0, 9.0))
    history.add(made_run(B, 32, 1, 9.0))
    assert winner(history) == B


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


def test_a_setting_that_broke_is_not_a_near_miss() -> None:
    history = TrialHistory(SLO, "throughput", A)
    history.add(made_run(A, 8, 0, 20.0))
    history.add(failed_run(A, 1, 8, MemoryError("no room")))
    assert history.trial(A).reason == "MemoryError: no room"
    assert nearest_miss(history) is None


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


def test_relative_scores_are_of_the_same_rounds() -> None:
    """C ran in a slow round only, so its rate is half of what it would be in the others' rounds."""
    history = TrialHistory(SLO, "throughput", A)
    for run in (made_run(A, 8, 0, 100.0), made_run(B, 8, 0, 80.0), made_run(A, 8, 1, 50.0), made_run(C, 8, 1, 45.0)):
        history.add(run)
    assert relative_scores(history) == {A: 1.0, B: pytest.approx(0.8), C: pytest.approx(0.9)}
    assert relative_scores(TrialHistory(SLO, "throughput", A)) == {}
