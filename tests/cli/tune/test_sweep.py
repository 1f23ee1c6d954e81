"""F18: which setting wins, and why the others did not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from virtual_time import run_virtual

from llmsched.cli.bench.measure import Measurement, measure
from llmsched.cli.bench.record import Chunk, RequestFailed, RequestRecord, Usage
from llmsched.cli.bench.workload import Workload
from llmsched.cli.tune.objective import Setting, Trial, choose, explain, noise_of
from llmsched.cli.tune.report import as_json
from llmsched.cli.tune.sweep import sweep
from llmsched.engine.latency import Slo

SLO = Slo(ttft=1.0, itl=0.2)
A, B, C, D, E = (Setting(tokens, 8) for tokens in (32, 64, 128, 256, 512))
WORK = Workload(num_prompts=10, max_concurrency=1)


def run_of(rate: float, ttft: float = 0.1, tokens: int = 11, gap: float = 0.05) -> Measurement:
    """Ten requests, one every 1/rate seconds, each with `tokens` tokens."""
    records = []
    for index in range(10):
        start = index / rate
        chunks = [Chunk(start + ttft + gap * number, "x", 1) for number in range(tokens)]
        end = start + 1 / rate
        failure = None if tokens else RequestFailed("empty stream", "the request ended without a token")
        usage = Usage(8, 0, tokens)
        records.append(RequestRecord(index, start, start, start, None, end, chunks, usage, failure))
    return measure(records, WORK, SLO)


def run_sweep(
    outcomes: dict[Setting, Callable[[int], Measurement]], rounds: int = 1, log: list[tuple[Setting, int]] | None = None
) -> list[Trial]:
    async def run(setting: Setting, round_index: int) -> Measurement:
        if log is not None:
            log.append((setting, round_index))
        return outcomes[setting](round_index)

    return asyncio.run(sweep(list(outcomes), rounds, run, SLO))


def out_of_memory(round_index: int) -> Measurement:
    raise MemoryError("CUDA out of memory.\nTried to allocate 20 GiB")


FAULT_18: dict[Setting, Callable[[int], Measurement]] = {
    A: lambda n: run_of(1.2),
    B: lambda n: run_of(12, tokens=0),
    C: out_of_memory,
    D: lambda n: run_of(5, ttft=3.0),
    E: lambda n: run_of(1.21),
}


def test_a_wins_and_every_other_has_its_reason() -> None:
    """F18."""
    trials = run_sweep(FAULT_18)
    best = choose(trials)
    assert best is not None
    assert best.setting == A
    assert [trial.reason for trial in trials] == [
        None,
        "10 of 10 requests failed: empty stream (the request ended without a token)",
        "MemoryError: CUDA out of memory. Tried to allocate 20 GiB",
        "P99 TTFT 3000 ms is above 1000 ms",
        None,
    ]
    report = as_json("m", trials, WORK, SLO, None)
    assert report["best"] == {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    assert [trial["feasible"] for trial in report["trials"]] == [True, False, False, False, True]
    assert report["trials"][2]["p99_ttft_ms"] is None
    assert report["trials"][3]["p99_ttft_ms"] == pytest.approx(3000)


def test_none_feasible_is_said_with_the_reason_of_each() -> None:
    """F18, F19."""
    trials = run_sweep({setting: FAULT_18[setting] for setting in (B, C, D)})
    assert choose(trials) is None
    assert as_json("m", trials, WORK, SLO, None)["best"] is None
    assert explain(trials, SLO).startswith("none of the 3 values tried is feasible")
    assert [trial.reason for trial in trials] == [
        "10 of 10 requests failed: empty stream (the request ended without a token)",
        "MemoryError: CUDA out of memory. Tried to allocate 20 GiB",
        "P99 TTFT 3000 ms is above 1000 ms",
    ]


def test_a_missed_itl_and_a_partly_failed_run_are_infeasible() -> None:
    def half(round_index: int) -> Measurement:
        records = [RequestRecord(0, 0.0, 0.0, 0.0, None, 1.0, [Chunk(1.0, "x", 1)], Usage(8, 0, 1))]
        broken = RequestRecord(1, 0.0, 0.0, 0.0, None, 1.0, failure=RequestFailed("timeout", "no end after 5 s"))
        return measure([*records, broken], WORK, SLO)

    trials = run_sweep({A: lambda n: run_of(1, gap=0.25), B: half})
    assert [trial.reason for trial in trials] == [
        "P99 ITL 250 ms is above 200 ms",
        "1 of 2 requests failed: timeout (no end after 5 s)",
    ]


def test_more_throughput_beyond_the_noise_wins() -> None:
    trials = run_sweep({A: lambda n: run_of(1.0), B: lambda n: run_of(1.2), C: lambda n: run_of(1.1)})
    best = choose(trials)
    assert best is not None
    assert best.setting == B
    assert explain(trials, SLO).endswith("is the most of the 3 of 3 values that meet the SLOs")


def test_the_sentence_tells_of_a_tie() -> None:
    trials = run_sweep({A: lambda n: run_of(1.2), E: lambda n: run_of(1.21)})
    assert explain(trials, Slo()) == (
        f"max_num_batched_tokens 32: {trials[0].output_tokens_per_s:.1f} tokens/s is the smallest value within the "
        f"noise (3%) of the most of the 2 of 2 values that work (no SLO was given), "
        f"{trials[1].output_tokens_per_s:.1f} tokens/s with 512"
    )


def test_rounds_are_interleaved_and_a_broken_setting_is_left_out() -> None:
    log: list[tuple[Setting, int]] = []
    trials = run_sweep({A: lambda n: run_of(1.0), C: out_of_memory, B: lambda n: run_of(1.2)}, rounds=3, log=log)
    assert log == [(A, 0), (C, 0), (B, 0), (A, 1), (B, 1), (A, 2), (B, 2)]
    assert [trial.completed for trial in trials] == [30, 0, 30]


def test_a_setting_that_breaks_in_a_later_round_is_infeasible() -> None:
    def later(round_index: int) -> Measurement:
        return out_of_memory(round_index) if round_index else run_of(9)

    trials = run_sweep({A: lambda n: run_of(1.0), B: later}, rounds=2)
    best = choose(trials)
    assert best is not None
    assert best.setting == A
    assert trials[1].reason is not None
    assert trials[1].reason.startswith("MemoryError")


def test_percentiles_are_of_all_rounds_together() -> None:
    """One round of two is slow: its samples are half of all, and P99 is theirs."""
    trials = run_sweep({A: lambda n: run_of(1.0, ttft=0.1 + 0.5 * n)}, rounds=2)
    assert trials[0].ttft.count == 20
    assert trials[0].ttft.p50 == pytest.approx(0.35)
    assert trials[0].ttft.p99 == pytest.approx(0.6)


def test_how_far_rounds_lie_apart_is_the_noise() -> None:
    """11.0 tokens a second and 12.1: 4.8 % to either side."""
    wobbly: Sequence[Trial] = run_sweep({A: lambda n: run_of(1.0 + 0.1 * n)}, rounds=2)
    assert wobbly[0].spread == pytest.approx(0.05 / 1.05)
    assert noise_of(wobbly) == pytest.approx(0.05 / 1.05)
    assert noise_of(run_sweep({A: lambda n: run_of(1.0)}, rounds=2)) == 0.03
    assert noise_of(run_sweep({A: lambda n: run_of(1.0 + n)}, rounds=2)) == 0.10


def test_capacity_is_not_taken_from_the_ramp() -> None:
    """F12: four tokens, at 10.0, 10.5, 11.0 and 11.5 s, are 2 a second."""

    def slow_start(round_index: int) -> Measurement:
        records = [
            RequestRecord(n, 0.0, 0.0, 0.0, None, end, [Chunk(end, "x", 1)], Usage(8, 0, 1))
            for n, end in enumerate([10.0, 10.5, 11.0, 11.5])
        ]
        return measure(records, WORK, SLO)

    trials = run_sweep({A: slow_start})
    assert trials[0].output_tokens_per_s == pytest.approx(2.0)


def test_a_round_that_would_not_end_in_time_is_not_begun() -> None:
    """Two settings of 10 s each: three rounds would take 60 s, and two fit into 45."""

    async def run(setting: Setting, round_index: int) -> Measurement:
        await asyncio.sleep(10)
        return run_of(1.0)

    trials = run_virtual(sweep([A, B], 5, run, SLO, time_limit=45))
    assert [trial.rounds for trial in trials] == [2, 2]
    slow = run_virtual(sweep([A, B], 5, run, SLO, time_limit=1))
    assert [trial.rounds for trial in slow] == [1, 1]
