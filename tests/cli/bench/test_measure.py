"""Where tokens are put in time, and when the client itself was too slow."""

from __future__ import annotations

import pytest

from llmsched.cli.bench.figures.measure import measure
from llmsched.cli.bench.figures.placing import CHUNKS, EXACT, USAGE, arrivals
from llmsched.cli.bench.figures.record import Chunk, RequestFailed, RequestRecord, Usage
from llmsched.cli.bench.load.synthetic import Workload
from llmsched.engine.latency import Slo


def record(chunks: list[Chunk], usage: Usage | None = None, **times: float) -> RequestRecord:
    known = {"scheduled": 0.0, "ready": 0.0, "sent": 0.0, "end": chunks[-1].time, **times}
    return RequestRecord(0, chunks=chunks, usage=usage or Usage(), **known)  # type: ignore[arg-type]


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
def test_tokens_are_spread_evenly_and_none_is_lost(chunks: int, tokens: int, shares: list[int]) -> None:
    placed, source = arrivals(record(texts(chunks), Usage(output_tokens=tokens)), None)
    assert [arrival.tokens for arrival in placed] == shares
    assert source == USAGE


def test_usage_with_only_the_last_chunk_is_a_total() -> None:
    chunks = [*texts(3), Chunk(4.0, "x", tokens=8)]
    placed, source = arrivals(record(chunks, Usage(output_tokens=8)), None)
    assert ([arrival.tokens for arrival in placed], source) == ([2, 2, 2, 2], USAGE)


def test_a_usage_of_zero_beside_text_is_no_count() -> None:
    placed, source = arrivals(record([Chunk(1.0, "x", 0), Chunk(2.0, "y", 0)], Usage(output_tokens=0)), None)
    assert ([arrival.tokens for arrival in placed], source) == ([1, 1], CHUNKS)


def test_the_worst_source_names_the_run() -> None:
    exact = record([Chunk(1.0, "x", 1)])
    assert measure([exact], Workload(), Slo()).token_counts == EXACT
    assert measure([exact, record(texts(1))], Workload(), Slo()).token_counts == CHUNKS


def test_a_late_client_makes_the_run_invalid() -> None:
    late = [record([Chunk(1.2, "x", 1)], ready=0.0, sent=0.2), record([Chunk(1.0, "x", 1)])]
    figures = measure(late, Workload(), Slo())
    assert figures.valid is False
    assert figures.client_lag.max == pytest.approx(0.2)
    assert figures.warnings[0].startswith("the client itself was late (P99 198.0 ms)")


def test_a_wait_for_a_slot_is_not_the_clients_fault() -> None:
    figures = measure([record([Chunk(9.0, "x", 1)], ready=5.0, sent=5.01)], Workload(), Slo())
    assert figures.valid is True
    assert figures.client_lag.max == pytest.approx(0.01)


def test_lag_is_judged_against_what_is_measured() -> None:
    """50 ms are nothing beside a TTFT of 10 s, and all of one of 60 ms."""
    assert measure([record([Chunk(10.0, "x", 1)], sent=0.05)], Workload(), Slo()).valid
    assert not measure([record([Chunk(0.06, "x", 1)], sent=0.05)], Workload(), Slo()).valid


def test_a_run_in_which_nothing_was_sent() -> None:
    failure = RequestFailed("connect", "refused")
    figures = measure([RequestRecord(index, 0.0, failure=failure) for index in range(3)], Workload(), Slo(ttft=1.0))
    assert (figures.completed, figures.failed, figures.failures) == (0, 3, {"connect": 3})
    assert figures.duration == 0.0
    assert figures.requests_per_s is figures.output_tokens_per_s is figures.goodput is None
    assert figures.valid is False
    assert figures.warnings == ()
