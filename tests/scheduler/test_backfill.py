"""Backfill: which requests pass one that does not fit, and what the ledger says about it."""

from __future__ import annotations

from fakes import Harness, assert_right, make_request, tokens
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmsched.engine.request import Request, RequestStatus
from llmsched.engine.scheduler.token_budget import LEAST_PREFILL


def test_requests_pass_one_that_does_not_fit_only_if_they_end_before_its_reserved_start() -> None:
    harness = Harness(20, budget=256, headroom=0.0, fast_lane_share=0.0)
    running = harness.add(make_request("running", tokens(100), 60, arrival=0.0))
    harness.step()
    head = harness.add(make_request("head", tokens(200, seed=1), 10, arrival=1.0))
    quick = harness.add(make_request("quick", tokens(20, seed=2), 8, arrival=2.0))
    slow = harness.add(make_request("slow", tokens(20, seed=3), 200, arrival=3.0))
    harness.step()
    assert quick.status is RequestStatus.RUNNING
    assert (head.status, slow.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    harness.run()
    assert_right(running, head, quick, slow)
    assert head.first_scheduled_time is not None
    assert slow.first_scheduled_time is not None
    assert head.first_scheduled_time <= slow.first_scheduled_time


def test_the_reserved_start_comes_nearer_with_every_step() -> None:
    """A request that would have ended before the reserved start sixty steps ago would not now."""
    harness = Harness(20, budget=256, headroom=0.0, fast_lane_prompt=50, output_prediction="max_tokens")
    running = harness.add(make_request("running", tokens(100), 60, arrival=0.0))
    harness.step()
    head = harness.add(make_request("head", tokens(200, seed=1), 10, arrival=1.0))
    for _ in range(45):
        harness.step()
    late = harness.add(make_request("late", tokens(20, seed=2), 30, arrival=harness.time))
    soon = harness.add(make_request("soon", tokens(20, seed=3), 8, arrival=harness.time))
    harness.step()
    assert (soon.status, late.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    harness.run()
    assert_right(running, head, late, soon)
    assert head.num_passed == 1


PACED = {"budget": 256, "headroom": 0.0, "fast_lane_share": 0.0, "output_prediction": "max_tokens", "target_itl": 0.01}


def test_the_steps_of_a_paced_prompt_are_counted() -> None:
    """Steps take longer than target_itl, so each computes LEAST_PREFILL tokens of prompts."""
    harness = Harness(24, **PACED)
    running = harness.add(make_request("running", tokens(100), 50, arrival=0.0))
    for _ in range(20):
        harness.step()
    head = harness.add(make_request("head", tokens(300, seed=1), 10, arrival=20.0))
    long = harness.add(make_request("long", tokens(9 * LEAST_PREFILL, seed=2), 24, arrival=21.0))
    short = harness.add(make_request("short", tokens(LEAST_PREFILL, seed=3), 24, arrival=22.0))
    harness.step()
    assert (short.status, long.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    harness.run()
    assert_right(running, head, long, short)
    assert head.first_scheduled_time == 50.0


sizes = st.tuples(st.integers(1, 250), st.integers(1, 60))


@settings(max_examples=40, deadline=None)
@given(first=st.lists(sizes, min_size=1, max_size=3), later=st.lists(sizes, max_size=6), paced=st.booleans())
def test_the_reserved_start_is_as_early_as_without_requests_that_pass(
    first: list[tuple[int, int]], later: list[tuple[int, int]], paced: bool
) -> None:
    def start(later: list[tuple[int, int]]) -> float:
        harness = Harness(24, **PACED | ({} if paced else {"target_itl": None}))
        for number, (length, output) in enumerate(first):
            harness.add(make_request(f"first{number}", tokens(length, seed=number), output))
        for _ in range(10):
            harness.step()
        head = harness.add(make_request("head", tokens(380, seed=5), 3, arrival=10.0))
        requests: list[Request] = []
        for number, (length, output) in enumerate(later):
            request = make_request(f"later{number}", tokens(length, seed=10 + number), output, arrival=11.0)
            requests.append(harness.add(request))
        harness.run()
        assert_right(head, *requests)
        assume(not harness.scheduler.counters.num_preemptions)  # the forecast of memory counts whole blocks in sum only
        assert head.first_scheduled_time is not None
        return head.first_scheduled_time

    assert start(later) <= start([])


def test_memory_is_reserved_for_the_first_that_does_not_fit_not_for_the_last() -> None:
    harness = Harness(40, budget=400, headroom=0.0, fast_lane_share=0.0, output_prediction="max_tokens")
    for name, output in (("soon", 10), ("late", 100)):
        harness.add(make_request(name, tokens(160, seed=output), output, arrival=0.0))
    harness.step()
    first = harness.add(make_request("first", tokens(300, seed=1), 4, arrival=1.0))
    second = harness.add(make_request("second", tokens(560, seed=2), 4, arrival=2.0))
    between = harness.add(make_request("between", tokens(20, seed=3), 50, arrival=3.0))
    harness.step()
    assert {first.status, second.status, between.status} == {RequestStatus.WAITING}
    told = harness.scheduler.ledger.entries("between")[-1]
    assert (told.what, told.details["reason"]) == ("held back", "memory is reserved for a request ahead of it")
    harness.run()
    assert_right(first, second, between)
    assert first.num_passed == 0


def test_passing_is_bounded() -> None:
    harness = Harness(40, budget=256, headroom=0.0, max_passes=3, max_num_seqs=4, output_prediction="none")
    harness.add(make_request("running", tokens(300), 150, arrival=0.0))
    harness.step()
    head = harness.add(make_request("head", tokens(400, seed=1), 4, arrival=1.0))
    for i in range(30):
        harness.add(make_request(f"q{i}", tokens(10, seed=i + 2), 2, arrival=2.0 + i))
    while head.status is not RequestStatus.FINISHED:
        harness.step()
    assert head.num_passed == 3


def test_a_request_learns_who_passed_it_but_not_the_ids_of_other_tenants() -> None:
    harness = Harness(40, budget=256, headroom=0.0, max_num_seqs=4, output_prediction="none")
    harness.add(make_request("running", tokens(300), 150, arrival=0.0))
    harness.step()
    head = harness.add(make_request("head", tokens(400, seed=1), 4, arrival=1.0, cache_salt="a"))
    for i, salt in enumerate("abba"):
        harness.add(make_request(f"q{i}", tokens(10, seed=i + 2), 2, arrival=2.0 + i, cache_salt=salt))
    harness.run()
    passed = [e for e in harness.scheduler.ledger.entries("head") if e.what == "passed"]
    assert [(e.details["by"], e.count) for e in passed] == [
        ("q0", 1),
        ("a request with another cache_salt", 2),
        ("q3", 1),
    ]
    assert [e.details["times"] for e in passed] == [1, 3, 4]
    assert_right(head)
