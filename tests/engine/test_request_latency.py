"""Each definition on numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo, goodput
from llmsched.engine.percentiles import statistic, summarise
from llmsched.engine.request_latency import (
    Arrival,
    RequestLatency,
    Stall,
    reading_waits,
    request_latency,
    steady_rate,
    tpot,
    worst_stall,
)


def stream(*arrivals: tuple[float, int]) -> list[Arrival]:
    return [Arrival(*arrival) for arrival in arrivals]


def latency(ttft: float = 0.5, e2e: float = 1.0, itl: tuple[float, ...] = (0.1,)) -> RequestLatency:
    return RequestLatency(ttft, e2e, tpot=0.1 if itl else None, itl=itl, worst_stall=None)


def test_tokens_one_by_one_and_in_chunks_have_the_same_itl() -> None:
    single = request_latency(0.0, stream(*((0.1 * n, 1) for n in range(1, 51))))
    chunks = request_latency(0.0, stream(*((1.0 * n, 10) for n in range(1, 6))))
    assert single.itl == pytest.approx([0.1] * 49)
    assert chunks.itl == pytest.approx([0.1] * 40)


def test_empty_chunks_are_not_tokens() -> None:
    got = request_latency(0.0, stream((0.01, 0), (0.02, 0), (0.5, 1), (0.6, 1), (0.7, 1), (0.8, 1), (0.9, 1), (2.0, 0)))
    assert got.ttft == 0.5
    assert got.e2e == 0.9
    assert got.tpot == pytest.approx(0.1)
    assert got.itl == pytest.approx([0.1] * 4)
    assert got.worst_stall == pytest.approx(0.1)


def test_a_stall_is_seen_in_itl_and_named() -> None:
    got = request_latency(10.0, stream((11.0, 1), (11.1, 1), (14.1, 1), (14.2, 1)))
    assert got.worst_stall == pytest.approx(3.0)
    assert max(got.itl) == pytest.approx(3.0)
    assert got.tpot == pytest.approx(3.2 / 3)


def test_one_token_has_neither_tpot_nor_itl() -> None:
    got = request_latency(0.0, stream((0.5, 1)))
    assert got == RequestLatency(ttft=0.5, e2e=0.5, tpot=None, itl=(), worst_stall=None)
    assert tpot(0.5, 0.5, 1) is None
    assert tpot(0.0, 0.0, 0) is None


def test_no_token_has_no_figure() -> None:
    assert request_latency(0.0, []) is None
    assert request_latency(0.0, stream((1.0, 0))) is None


def test_percentiles_interpolate_linearly() -> None:
    got = summarise([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (got.count, got.mean, got.p50, got.max) == (5, 3.0, 3.0, 5.0)
    assert got.p95 == pytest.approx(4.8)
    assert got.p99 == pytest.approx(4.96)


def test_no_sample_gives_none_not_zero() -> None:
    got = summarise([])
    assert (got.count, got.mean, got.p50, got.p95, got.p99, got.max) == (0, None, None, None, None, None)


def test_goodput_keeps_failures_in_the_denominator() -> None:
    got = goodput(Slo(ttft=0.5), [latency(0.4), latency(0.6)], failed=2, duration=10.0)
    assert got.requests_per_s == pytest.approx(0.1)
    assert got.attainment == {"ttft": 0.25, "all": 0.25}


def test_goodput_of_zero_is_zero_and_without_slo_it_is_null() -> None:
    """0.0 is a figure, null is the lack of one."""
    got = goodput(Slo(ttft=0.0), [latency()], failed=0, duration=1.0)
    assert got.requests_per_s == 0.0
    assert goodput(Slo(), [latency()], failed=0, duration=1.0) is None
    assert goodput(Slo(ttft=1.0), [], failed=0, duration=1.0) is None
    assert goodput(Slo(ttft=1.0), [latency()], failed=0, duration=0.0) is None


def test_goodput_is_zero_if_all_requests_failed() -> None:
    got = goodput(Slo(ttft=1.0), [], failed=3, duration=0.0)
    assert (got.requests_per_s, got.attainment) == (0.0, {"ttft": 0.0, "all": 0.0})


def test_the_itl_slo_looks_at_a_requests_own_p99() -> None:
    steady, stalled = latency(itl=(0.01,) * 50), latency(itl=(0.01,) * 49 + (2.0,))
    assert Slo(itl=0.05).met_by(steady) == {"itl": True}
    assert Slo(itl=0.05).met_by(stalled) == {"itl": False}
    assert Slo(itl=0.05, tpot=0.05).met_by(latency(itl=())) == {"itl": True, "tpot": True}


def test_steady_rate_leaves_out_the_ramp() -> None:
    assert steady_rate(stream((10.0, 1), (10.5, 1), (11.0, 1), (11.5, 1))) == 2.0
    assert steady_rate(stream((11.5, 1), (10.0, 1), (11.0, 1), (10.5, 1))) == 2.0
    assert steady_rate(stream((1.0, 5), (2.0, 10), (3.0, 10))) == 10.0
    assert steady_rate(stream((10.0, 1))) is None
    assert steady_rate(stream((10.0, 1), (10.0, 1))) is None
    assert steady_rate([]) is None


def test_steady_rate_leaves_out_all_tokens_of_the_first_moment() -> None:
    """Two streams in lockstep, a token each at 1, 2 and 3 s: two tokens a second."""
    assert steady_rate(stream((1.0, 1), (1.0, 1), (2.0, 1), (2.0, 1), (3.0, 1), (3.0, 1))) == 2.0


def test_the_worst_stall_is_the_first_of_the_longest() -> None:
    got = worst_stall(stream((1.0, 2), (1.5, 0), (2.0, 3), (4.0, 1), (6.0, 1)))
    assert got == Stall(2.0, at=2.0, tokens_before=5)
    assert worst_stall(stream((1.0, 5), (2.0, 0))) is None


@pytest.mark.parametrize(
    ("arrivals", "waits"),
    [
        ([(9.0, 1), (9.1, 1), (9.2, 1)], []),
        ([(9.0, 1), (9.05, 1), (9.3, 1)], [0.1]),
        ([(0.0, 1), (3.0, 1), (3.1, 1), (3.2, 1)], [2.9]),
        ([(0.0, 30), (3.0, 1), (3.2, 1)], [0.1]),
        ([(0.0, 10), (0.5, 0), (1.25, 10), (2.5, 1)], [0.25, 0.25]),
        ([(0.0, 0)], []),
    ],
    ids=["on time", "late", "a stall delays the rest", "read ahead", "chunks", "nothing"],
)
def test_a_reader_at_ten_tokens_a_second(arrivals: list[tuple[float, int]], waits: list[float]) -> None:
    assert reading_waits(stream(*arrivals), 10.0) == pytest.approx(waits)


def test_statistics() -> None:
    samples = [4.0, 1.0, 2.0, 3.0, 5.0]
    assert [statistic(samples, name) for name in ("mean", "max", "p50")] == [3.0, 5.0, 3.0]
    for name, known in (("p95", 95), ("p99.9", 99.9), ("p12.5", 12.5)):
        assert statistic(samples, name) == pytest.approx(float(np.percentile(samples, known)))
    assert statistic([7.0], "p99") == 7.0
    assert statistic([], "max") is None


@pytest.mark.parametrize("name", ["p0", "p100", "p101", "99", "median", "P99", "p-1", "", "p9 "])
def test_an_unknown_statistic_is_refused(name: str) -> None:
    with pytest.raises(LlmschedError, match="not a statistic; allowed are mean, max and percentiles"):
        Slo(itl=1.0, itl_statistic=name)


def test_the_itl_slo_can_use_another_statistic() -> None:
    stalled = latency(itl=(0.01,) * 199 + (2.0,))
    for name, met in (("p50", True), ("p99", True), ("p99.9", False), ("max", False), ("mean", True)):
        assert Slo(itl=0.05, itl_statistic=name).met_by(stalled) == {"itl": met}


def test_goodput_counts_misses_per_slo() -> None:
    requests = [latency(0.4, e2e=9.0), latency(0.6, e2e=9.0), latency(0.6, e2e=1.0), latency(0.4, e2e=1.0)]
    got = goodput(Slo(ttft=0.5, e2e=2.0), requests, failed=1, duration=1.0)
    assert (got.requests_per_s, got.missed) == (1.0, {"ttft": 2, "e2e": 2})
    assert got.missed_alone == {"ttft": 1, "e2e": 1}
    assert got.attainment == pytest.approx({"ttft": 0.4, "e2e": 0.4, "all": 0.2})
