"""Times of tokens, and runs in which the client itself was too slow."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from llmsched.cli.figures.client_lag import loop_lags, settled_heap
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import Chunk, LoopLag, ReportedUsage, RequestFailed, RequestRecord, RunRecord
from llmsched.cli.figures.token_times import CHUNKS, EXACT, USAGE, arrivals
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.engine.goodput import Slo


def record(chunks: list[Chunk], usage: ReportedUsage | None = None, **times: float) -> RequestRecord:
    known = {"scheduled": 0.0, "ready": 0.0, "sent": 0.0, "end": chunks[-1].time, **times}
    return RequestRecord(0, chunks=chunks, usage=usage or ReportedUsage(), **known)  # type: ignore[arg-type]


def texts(count: int) -> list[Chunk]:
    return [Chunk(float(index + 1), "x") for index in range(count)]


@pytest.mark.parametrize(
    ("chunks", "tokens", "shares"),
    [
        (4, 4, [1, 1, 1, 1]),
        (4, 10, [3, 2, 3, 2]),
        (5, 50, [10] * 5),
        (3, 2, [1, 1, 0]),
        (3, 1, [1, 0, 0]),
    ],
)
def test_tokens_are_spread_evenly_over_chunks(chunks: int, tokens: int, shares: list[int]) -> None:
    placed, source = arrivals(record(texts(chunks), ReportedUsage(output_tokens=tokens)), None)
    assert [arrival.tokens for arrival in placed] == shares
    assert source == USAGE


def test_usage_with_only_the_last_chunk_is_a_total() -> None:
    chunks = [*texts(3), Chunk(4.0, "x", tokens=8)]
    placed, source = arrivals(record(chunks, ReportedUsage(output_tokens=8)), None)
    assert ([arrival.tokens for arrival in placed], source) == ([2, 2, 2, 2], USAGE)


def test_a_usage_of_zero_with_text_is_ignored() -> None:
    placed, source = arrivals(record([Chunk(1.0, "x", 0), Chunk(2.0, "y", 0)], ReportedUsage(output_tokens=0)), None)
    assert ([arrival.tokens for arrival in placed], source) == ([1, 1], CHUNKS)


def test_the_least_reliable_token_count_is_reported() -> None:
    exact = record([Chunk(1.0, "x", 1)])
    assert measure(RunRecord([exact]), SyntheticLoad(), Slo()).tokens.source == EXACT
    assert measure(RunRecord([exact, record(texts(1))]), SyntheticLoad(), Slo()).tokens.source == CHUNKS


def test_a_late_client_makes_the_run_invalid() -> None:
    late = [record([Chunk(1.2, "x", 1)], ready=0.0, sent=0.2), record([Chunk(1.0, "x", 1)])]
    figures = measure(RunRecord(late), SyntheticLoad(), Slo())
    assert figures.valid is False
    assert figures.client.send.max == pytest.approx(0.2)
    assert figures.warnings[0].startswith("the client itself was late (P99 198.0 ms)")


def test_waiting_for_max_concurrency_is_not_client_lag() -> None:
    figures = measure(RunRecord([record([Chunk(9.0, "x", 1)], ready=5.0, sent=5.01)]), SyntheticLoad(), Slo())
    assert figures.valid is True
    assert figures.client.send.max == pytest.approx(0.01)


def test_lag_is_compared_with_the_latency() -> None:
    """A lag of 50 ms does not matter for a TTFT of 10 s, but for one of 60 ms."""
    assert measure(RunRecord([record([Chunk(10.0, "x", 1)], sent=0.05)]), SyntheticLoad(), Slo()).valid
    assert not measure(RunRecord([record([Chunk(0.06, "x", 1)], sent=0.05)]), SyntheticLoad(), Slo()).valid


def run_of(gap: float, *, tokens: int = 1, ttft: float = 3.0, **lags: Any) -> Measurement:
    """Measure ten requests whose chunks are `gap` seconds apart, with a client whose loop has these lags."""
    chunks = [Chunk(ttft + gap * n, "x", tokens) for n in range(20)]
    return measure(
        RunRecord([record(chunks) for _ in range(10)], loop_lags=[LoopLag(due=ttft + 1, **lags)] * 50),
        SyntheticLoad(),
        Slo(),
    )


def test_a_client_that_reads_late_makes_the_run_invalid_however_long_the_ttft_is() -> None:
    """A lag of 100 ms is small for a TTFT of 3 s but larger than gaps of 50 ms."""
    figures = run_of(0.05, late=0.1, machine=0.09)
    assert figures.valid is False
    assert figures.warnings[0] == (
        "the client itself was late (P99 100.0 ms): these figures are not the target's, because this machine was busy "
        "with other work"
    )
    assert "more to do than one core can" in run_of(0.05, late=0.1, machine=0.02).warnings[0]
    assert run_of(0.05, late=0.015).valid


def test_loop_lag_is_compared_with_the_gaps_between_chunks() -> None:
    """40 ms is much for gaps of 0.1 s and little for gaps of 1 s, however many tokens a chunk has."""
    assert not run_of(0.1, late=0.04).valid
    assert not run_of(0.1, tokens=10, late=0.04).valid
    assert run_of(1.0, late=0.04).valid
    assert run_of(1.0, tokens=50, late=0.04).valid


def test_loop_lag_before_the_first_token_affects_no_gap() -> None:
    """Sending all requests at once keeps the client busy, which only TTFTs include."""
    before, after = [LoopLag(1.0, 0.2)] * 50, [LoopLag(5.0, 0.001)] * 50
    chunks = [Chunk(3.0 + 0.05 * n, "x", 1) for n in range(100)]
    assert measure(RunRecord([record(chunks)], loop_lags=before + after), SyntheticLoad(), Slo()).valid
    assert not measure(
        RunRecord([record(chunks)], loop_lags=[LoopLag(1.0, 0.4)] * 50 + after), SyntheticLoad(), Slo()
    ).valid
    assert not measure(
        RunRecord([record(chunks)], loop_lags=[*before, *after, LoopLag(5.0, 0.2)]), SyntheticLoad(), Slo()
    ).valid


def test_timers_due_while_the_loop_was_late_count_too() -> None:
    """A loop blocked for 0.1 s is late for ten timers, one every 10 ms."""

    async def main() -> list[LoopLag]:
        async with loop_lags(0.01) as lags:
            await asyncio.sleep(0)
            time.sleep(0.1)
            await asyncio.sleep(0.02)
        return lags

    late = [lag for lag in asyncio.run(main()) if lag.late > 0.005]
    assert len(late) >= 8
    assert late[0].late - late[7].late == pytest.approx(late[7].due - late[0].due) == pytest.approx(0.07)


def test_an_engine_in_the_same_process_takes_its_part_of_the_loop() -> None:
    chunks = [Chunk(1.0 + 0.01 * n, "x", 1) for n in range(20)]
    figures = measure(
        RunRecord([record(chunks)], loop_lags=[LoopLag(2.0, 0.2)] * 50, own_process=False), SyntheticLoad(), Slo()
    )
    assert figures.valid
    assert figures.client.loop.p99 == pytest.approx(0.2)
    assert not any("late" in warning for warning in figures.warnings)


def test_a_tail_that_may_be_the_clients_own_is_named() -> None:
    figures = run_of(0.02, late=0.008, machine=0.008)
    assert figures.valid
    assert figures.warnings[0].startswith("P99 of ITL may be too high by up to 8.0 ms: the client itself was late")
    assert not any("too high" in warning for warning in run_of(0.04, late=0.008).warnings)
    assert not any("too high" in warning for warning in run_of(0.02, tokens=4, late=0.008).warnings)


def test_what_other_work_takes_is_told_from_the_clients_own() -> None:
    async def main(work: Callable[[], None]) -> list[LoopLag]:
        async with loop_lags(0.001) as lags:
            await asyncio.sleep(0)
            work()
            await asyncio.sleep(0.01)
        return lags

    def compute() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    own, other = asyncio.run(main(compute)), asyncio.run(main(lambda: time.sleep(0.1)))
    assert any(lag.late - lag.machine > 0.09 for lag in own)
    assert any(lag.machine > 0.09 for lag in other)


def test_garbage_collection_skips_the_records_during_a_run() -> None:
    """With a million tokens it would take 200 ms, which would stall every stream."""
    thresholds = gc.get_threshold()
    with settled_heap():
        before = [generation["collections"] for generation in gc.get_stats()]
        kept = [Chunk(float(number), "x", 1) for number in range(200_000)]
        young, _, old = (now["collections"] - then for now, then in zip(gc.get_stats(), before, strict=True))
    assert kept
    assert young > 0
    assert old == 0
    assert gc.get_threshold() == thresholds


def test_a_run_in_which_nothing_was_sent() -> None:
    failure = RequestFailed("connect", "refused")
    figures = measure(
        RunRecord([RequestRecord(index, 0.0, failure=failure) for index in range(3)]), SyntheticLoad(), Slo(ttft=1.0)
    )
    assert (figures.requests.completed, figures.requests.failed, figures.requests.failures) == (0, 3, {"connect": 3})
    assert figures.duration == 0.0
    assert figures.rates.requests is figures.rates.output_tokens is None
    assert (figures.goodput.requests_per_s, figures.goodput.attainment["all"]) == (0.0, 0.0)
    assert figures.valid is False
    assert figures.warnings == ()
