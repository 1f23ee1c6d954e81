"""Faults that other schedulers had, each as it was reported, and the right behaviour."""

from __future__ import annotations

import pytest
from fakes import Harness, assert_right, make_request, tokens

from llmsched.engine.request import Request, RequestStatus

#: Every fault is tried with preemption by recomputation and by swap.
MODES = pytest.mark.parametrize("swap", [{}, {"preemption_mode": "swap", "swap_blocks": 64}], ids=["recompute", "swap"])


def scheduled(harness: Harness) -> int:
    return sum(plan.num_tokens for plan in harness.executor.plans)


@MODES
def test_a_long_prompt_does_not_go_round_in_circles(swap: dict[str, object]) -> None:
    """The fault: a request was admitted for a chunk, ran out of memory, was preempted and restarted, endlessly."""
    harness = Harness(40, budget=64, **swap)
    first = harness.add(make_request("A", tokens(400), 100))
    for _ in range(10):
        harness.step()
    second = harness.add(make_request("B", tokens(400, seed=1), 100, arrival=10.0))
    steps = harness.run()
    assert_right(first, second)
    assert scheduled(harness) <= 2 * (400 + 99) + 400
    assert second.num_preemptions <= 1
    assert steps <= 100 + 7 + 100, "A goes on at one token a step; B follows"


@MODES
@pytest.mark.parametrize("caching", [True, False])
def test_a_victim_that_was_due_in_the_same_step(caching: bool, swap: dict[str, object]) -> None:
    """The pool is full and all three need a block in one step: the low one is preempted before it gets any."""
    harness = Harness(
        6, budget=64, output_prediction="none", headroom=0.0, caching=caching, fast_lane_share=0.0, **swap
    )
    low = harness.add(make_request("low", tokens(16), 40, arrival=0.0, priority=1))
    high = [harness.add(make_request(f"high{i}", tokens(16, seed=i + 1), 40, arrival=0.0)) for i in range(2)]
    while harness.scheduler.kv.pool.num_available or low.num_tokens <= 32:
        harness.step()
    assert {request.num_tokens for request in (low, *high)} == {33}
    harness.step()
    assert {row.sequence.request_id for row in harness.executor.plans[-1].rows} == {"high0", "high1"}
    assert (low.num_preemptions, low.status is RequestStatus.RUNNING) == (1, False)
    harness.run()
    assert_right(low, *high)


@MODES
def test_thirty_in_a_pool_for_a_few_advance_in_each_step(swap: dict[str, object]) -> None:
    """The fault: the victim was put at the front of the queue and considered again, endlessly."""
    harness = Harness(20, budget=256, max_num_seqs=30, output_prediction="none", **swap)
    requests = [harness.add(make_request(f"r{i:02}", tokens(32, seed=i), 128, arrival=0.0)) for i in range(30)]
    while harness.scheduler.has_work():
        harness.step()
        assert any(row.sample for row in harness.executor.plans[-1].rows)
    assert_right(*requests)
    assert harness.scheduler.counters.num_preemptions > 0


def test_a_cold_request_among_hot_ones() -> None:
    """Two requests may run; for sixty steps, more requests with a shared prefix arrive than are served."""
    harness = Harness(60, budget=256, max_num_seqs=2, fast_lane_share=0.0)
    shared = tokens(64)
    harness.add(make_request("warm", shared, 1))
    harness.run()
    began, count = harness.time, 0
    cold: Request | None = None
    served = -1
    while harness.time < began + 60:
        for _ in range(2):
            harness.add(make_request(f"hot{count:03}", [*shared, count], 4, arrival=harness.time))
            count += 1
        if cold is None and harness.time > began:
            cold = harness.add(make_request("cold", tokens(64, seed=9), 4, arrival=harness.time))
        harness.step()
        if cold is not None and cold.status is not RequestStatus.WAITING and served < 0:
            served = int(harness.time - began)
    assert 0 <= served <= 12, "the four that came before it at two a step, and no more"


def test_a_short_prompt_beside_long_prefills() -> None:
    harness = Harness(1200, budget=256)
    decoding = harness.add(make_request("decoding", tokens(10), 200, arrival=0.0))
    harness.step()
    long = [harness.add(make_request(f"long{i}", tokens(4096, seed=i + 1), 4, arrival=1.0)) for i in range(2)]
    for _ in range(3):
        harness.step()
    short = harness.add(make_request("short", tokens(16, seed=5), 1, arrival=4.0))
    harness.step()
    assert short.status is RequestStatus.FINISHED
    assert all(request.num_computed_tokens < 4096 for request in long)
    before = decoding.num_output_tokens
    harness.step()
    assert decoding.num_output_tokens == before + 1
    harness.run()
    assert_right(decoding, short, *long)


@MODES
def test_a_prompt_that_just_fits_beside_one_that_grows(swap: dict[str, object]) -> None:
    harness = Harness(20, budget=32, output_prediction="none", headroom=0.0, **swap)
    first = harness.add(make_request("A", tokens(49), 150))
    for _ in range(3):
        harness.step()
    second = harness.add(make_request("B", tokens(240, seed=1), 40, arrival=3.0))
    harness.run(limit=1000)
    assert_right(first, second)
    assert first.num_preemptions + second.num_preemptions <= 1


@MODES
def test_two_partly_prefilled_prompts_do_not_block_each_other(swap: dict[str, object]) -> None:
    harness = Harness(32, budget=64, output_prediction="none", headroom=0.0, **swap)
    pair = [harness.add(make_request(f"p{i}", tokens(n, seed=i), 40)) for i, n in enumerate((400, 300))]
    ended: list[str] = []
    while harness.scheduler.has_work():
        harness.step()
        ended += [r.request_id for r in pair if r.status is RequestStatus.FINISHED and r.request_id not in ended]
    assert ended == ["p0", "p1"]
    assert_right(*pair)
    assert len(harness.executor.plans) <= 7 + 40 + 5 + 40


def test_recomputation_is_no_hit_of_the_prefix_cache() -> None:
    harness = Harness(24, budget=256, max_num_seqs=16, output_prediction="none", headroom=0.0)
    requests = [harness.add(make_request(f"r{i:02}", tokens(40, seed=i + 1), 40, arrival=float(i))) for i in range(40)]
    harness.run()
    assert_right(*requests)
    counters = harness.scheduler.counters
    assert counters.num_preemptions > 0
    assert (counters.prefix_queried_tokens, counters.prefix_hit_tokens) == (40 * 40, 0)
    assert 0 < counters.recomputed_tokens < scheduled(harness) - 40 * (40 + 39) + 1
