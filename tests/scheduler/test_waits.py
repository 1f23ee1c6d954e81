"""What the ledger says that a request waited for."""

from __future__ import annotations

import pytest
from fakes import Harness, make_request, tokens

from llmsched.engine.request import FinishReason, Request
from llmsched.engine.scheduler.ledger import WAITS
from llmsched.engine.scheduler.waiting_queue import WaitReason


def waited(harness: Harness, request: Request) -> list[dict[str, float]]:
    """Return the seconds waited for each reason, for each admission of the request."""
    admitted = [e for e in harness.scheduler.ledger.entries(request.request_id) if e.what == "admitted"]
    return [
        {
            name.removeprefix("waited_for_").removesuffix("_ms"): float(ms) / 1e3
            for name, ms in entry.details.items()
            if name.startswith("waited_for_")
        }
        for entry in admitted
    ]


@pytest.mark.parametrize("policy", ["fair", "serial", "static"])
def test_for_a_place(policy: str) -> None:
    harness = Harness(64, max_num_seqs=1, max_model_len=64, scheduling_policy=policy)
    first = harness.add(make_request("first", tokens(10), 8, arrival=0.0))
    harness.step()
    second = harness.add(make_request("second", tokens(10, seed=1), 2, arrival=1.0))
    harness.run()
    assert waited(harness, first) == [{}]
    assert waited(harness, second) == [{"slot": 7.0}], "from 1 to 8"


def test_for_the_end_of_a_static_batch_though_it_has_places() -> None:
    harness = Harness(64, max_num_seqs=4, max_model_len=64, scheduling_policy="static")
    harness.add(make_request("first", tokens(10), 8, arrival=0.0))
    harness.step()
    late = harness.add(make_request("late", tokens(10, seed=1), 2, arrival=1.0))
    harness.run()
    assert waited(harness, late) == [{"slot": 7.0}]


def test_for_memory_at_first_and_after_preemption() -> None:
    harness = Harness(10, output_prediction="none", headroom=0.0)
    pair = [harness.add(make_request(f"p{i}", tokens(48, seed=i), 64, arrival=float(i))) for i in range(2)]
    third = harness.add(make_request("third", tokens(100, seed=5), 2, arrival=2.0))
    harness.run()
    assert pair[1].num_preemptions == 1
    first, again = waited(harness, pair[1])
    assert "memory" not in first
    assert set(again) == {"memory"}
    assert again["memory"] > 10
    (after,) = waited(harness, third)
    assert after["memory"] > again["memory"]


def test_for_room_in_a_step_and_for_a_prefix() -> None:
    harness = Harness(64, budget=32, fast_lane_share=0.0, headroom=0.0)
    harness.add(make_request("long", tokens(320), 2, arrival=0.0))
    behind = harness.add(make_request("next", tokens(20, seed=1), 2, arrival=0.0))
    harness.run()
    assert waited(harness, behind) == [{"step": 10.0}]
    harness = Harness(64, budget=256)
    harness.add(make_request("writer", tokens(100), 2, arrival=0.0))
    twin = harness.add(make_request("writes too", tokens(100), 2, arrival=0.0))
    harness.run()
    assert waited(harness, twin) == [{"prefix": 1.0}]


def test_requests_that_end_while_they_wait_leave_nothing_behind() -> None:
    harness = Harness(64, max_num_seqs=1)
    requests = [harness.add(make_request(f"r{i}", tokens(10, seed=i), 4, arrival=0.0)) for i in range(4)]
    harness.step()
    for request in requests[1:3]:
        harness.scheduler.finish(request, FinishReason.ABORT)
    harness.run()
    assert not harness.scheduler.waiting.times._at_start


def test_configure_keeps_the_waiting_times_of_waiting_requests() -> None:
    harness = Harness(64, max_num_seqs=1)
    first = harness.add(make_request("first", tokens(10), 8, arrival=0.0))
    harness.step()
    second = harness.add(make_request("second", tokens(10, seed=1), 2, arrival=1.0))
    for _ in range(3):
        harness.step()
    harness.scheduler.finish(first, FinishReason.ABORT)
    harness.time = 10.0
    harness.scheduler.configure(max_num_batched_tokens=32)
    harness.run()
    assert waited(harness, second) == [{"slot": 9.0}], "from 1 to 10"


def test_totals_count_waits_before_the_first_admission() -> None:
    harness = Harness(10, output_prediction="none", headroom=0.0)
    requests = [harness.add(make_request(f"p{i}", tokens(48, seed=i), 64, arrival=float(i))) for i in range(2)]
    requests.append(harness.add(make_request("third", tokens(100, seed=5), 2, arrival=2.0)))
    harness.run()
    first = [waited(harness, request)[0] for request in requests]
    assert len(waited(harness, requests[1])) == 2
    for reason, name in WAITS.items():
        total = getattr(harness.scheduler.counters, name)
        assert total == pytest.approx(sum(each.get(reason, 0.0) for each in first))
    assert harness.scheduler.counters.wait_for_memory > 10
    assert list(WAITS) == [reason.value for reason in WaitReason]
