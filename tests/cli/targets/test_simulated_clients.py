"""Loads on a virtual clock: exact times of requests and tokens, and failures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from configs import resolved
from simulated_run import LinearCost

from llmsched.cli.figures.record import RequestRecord
from llmsched.cli.load.load import PlannedRequest
from llmsched.cli.targets.simulated_clients import SimulatedClients
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.simulated_engine import SimulatedEngine

#: A step takes a second, and each prefill token a tenth.
COST = LinearCost(1.0, 0.1, 0.0, 0.0)
CONFIG = resolved(max_model_len=128, max_num_batched_tokens=64, max_num_seqs=8, headroom=0.0)


@dataclass(frozen=True)
class Ids:
    token_ids: list[int]
    text: None = None


def request(index: int, offset: float = 0.0, length: int = 10, output_len: int = 1, first: int = 0) -> PlannedRequest:
    start = first or 1000 * (index + 1)
    return PlannedRequest(index, offset, Ids(list(range(start, start + length))), output_len)


def run(planned: list[PlannedRequest], *, blocks: int = 64, knobs: Any = None, **load: Any) -> list[RequestRecord]:
    config = replace(CONFIG, **(knobs or {}))
    engine = SimulatedEngine(config, make_kv(config, blocks), COST)
    settings: dict[str, Any] = {"closed": False, "max_concurrency": None, "timeout": None} | load
    records = SimulatedClients(planned, [engine], **settings).run()
    engine.scheduler.check_integrity()
    assert not engine.has_work()
    return records


def times(record: RequestRecord) -> list[float]:
    return [chunk.time for chunk in record.chunks]


def test_one_request_takes_its_steps() -> None:
    (record,) = run([request(0, length=10, output_len=3)])
    assert (record.scheduled, record.ready, record.sent) == (0, 0, 0)
    assert times(record) == pytest.approx([2.0, 3.0, 4.0])
    assert record.end == pytest.approx(4.0)
    assert record.completed
    assert (record.usage.prompt_tokens, record.usage.output_tokens, record.usage.cached_tokens) == (10, 3, 0)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    (record,) = run([request(0, length=100)])
    assert times(record) == pytest.approx([1 + 6.4 + 1 + 3.6])


def test_a_request_that_arrives_during_a_step_joins_the_next_and_counts_from_its_arrival() -> None:
    first, second = run([request(0), request(1, offset=1.5)])
    assert times(first) == pytest.approx([2.0])
    assert second.scheduled == second.sent == 1.5
    assert times(second) == pytest.approx([4.0])


def test_a_load_ends_when_its_task_is_cancelled() -> None:
    """Ctrl-C ends a long simulation, which never awaits."""
    engine, steps = SimulatedEngine(CONFIG, make_kv(CONFIG, 64), COST), 0

    async def main() -> None:
        task = asyncio.current_task()

        def after_step(now: float) -> None:
            nonlocal steps
            steps += 1
            if steps == 3:
                task.cancel()

        planned = [request(0, output_len=50)]
        SimulatedClients(planned, [engine], closed=False, max_concurrency=None, timeout=None).run(after_step)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert steps == 3


def test_the_clock_skips_idle_time() -> None:
    first, second = run([request(0), request(1, offset=100.0)])
    assert times(first) == pytest.approx([2.0])
    assert times(second) == pytest.approx([102.0])


def test_a_closed_loop_sends_when_a_client_is_free() -> None:
    records = run([request(i) for i in range(4)], closed=True, max_concurrency=2)
    assert [record.scheduled for record in records] == pytest.approx([0, 0, 3, 3])
    assert [record.end for record in records] == pytest.approx([3, 3, 6, 6])


def test_a_closed_loop_stops_after_its_time() -> None:
    records = run([request(i) for i in range(9)], closed=True, max_concurrency=1, stop_after=4.0)
    assert [record.scheduled for record in records] == pytest.approx([0, 2])
    records = run([request(i) for i in range(9)], closed=True, max_concurrency=1, stop_after=4.1)
    assert [record.scheduled for record in records] == pytest.approx([0, 2, 4])


def test_the_wait_for_a_free_client_counts() -> None:
    records = run([request(i, offset=i / 2) for i in range(3)], max_concurrency=1)
    assert [record.scheduled for record in records] == [0, 0.5, 1.0]
    assert [record.ready for record in records] == pytest.approx([0, 2, 4])
    assert [record.end for record in records] == pytest.approx([2, 4, 6])


def test_a_request_that_is_too_long_is_refused_and_the_others_go_on() -> None:
    records = run([request(0, length=128), request(1), request(2, length=100, output_len=29)])
    assert [record.completed for record in records] == [False, True, False]
    for record in (records[0], records[2]):
        assert record.failure.reason == "refused"
        assert "the context of this server is 128 tokens" in record.failure.detail
        assert record.end == 0.0


def test_a_request_larger_than_the_pool_is_refused() -> None:
    (record,) = run([request(0, length=100)], blocks=6)
    assert "more than the 6 KV blocks" in record.failure.detail


def test_a_refused_request_frees_its_client() -> None:
    records = run([request(0, length=128), request(1)], closed=True, max_concurrency=1)
    assert [record.completed for record in records] == [False, True]
    assert records[1].scheduled == 0.0


def test_the_queue_has_its_limit() -> None:
    records = run([request(i) for i in range(5)], knobs={"max_queue_size": 3})
    assert [record.completed for record in records] == [True, True, True, False, False]
    assert records[4].failure.detail == "3 requests are waiting; at most 3 may"


def test_a_request_times_out_at_its_deadline() -> None:
    slow, late = run([request(0, output_len=50), request(1, offset=20.0)], timeout=10.5)
    assert (slow.failure.reason, slow.end) == ("timeout", 10.5)
    assert times(slow) == pytest.approx([2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert late.completed
    assert late.end == pytest.approx(22.0)


def test_a_timeout_frees_the_client() -> None:
    records = run([request(0, output_len=50), request(1)], closed=True, max_concurrency=1, timeout=10.5)
    assert records[1].scheduled == 10.5
    assert times(records[1]) == pytest.approx([13.0])


def test_without_output_a_request_counts_as_empty() -> None:
    (record,) = run([request(0, output_len=0)])
    assert record.failure.reason == "empty stream"


def test_prompts_that_begin_alike_hit_the_cache() -> None:
    records = run([request(0, length=40, first=5), request(1, offset=50.0, length=41, first=5)])
    assert [record.usage.cached_tokens for record in records] == [0, 32]
    assert times(records[1]) == pytest.approx([51.9])


def test_an_idle_engine_waits_for_more_requests() -> None:
    knobs = {"schedule_window": 5.0, "min_schedule_batch": 2}
    alone, *pair = run([request(0), request(1, offset=20.0), request(2, offset=22.0)], knobs=knobs)
    assert times(alone) == pytest.approx([7.0])
    assert [times(record) for record in pair] == [pytest.approx([25.0])] * 2


def test_a_deadline_ends_the_wait_for_more_requests() -> None:
    knobs = {"schedule_window": 5.0, "min_schedule_batch": 2}
    (record,) = run([request(0)], knobs=knobs, timeout=3.0)
    assert record.failure is not None
    assert record.end == 3.0


def test_preempted_requests_end_with_all_their_tokens() -> None:
    knobs = {"output_prediction": "none", "preemption_mode": "recompute"}
    planned = [request(i, length=30, output_len=40) for i in range(4)]
    config = replace(CONFIG, **knobs)
    engine = SimulatedEngine(config, make_kv(config, 10), COST)
    records = SimulatedClients(planned, [engine], closed=False, max_concurrency=None, timeout=None).run()
    assert engine.scheduler.counters.num_preemptions > 0
    assert [len(record.chunks) for record in records] == [40] * 4
