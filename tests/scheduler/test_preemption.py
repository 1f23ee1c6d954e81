"""Preemption: how a victim loses its KV, what that is predicted to cost, and what the ledger says."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import BLOCK_BYTES, Harness, assert_right, make_request, tokens
from simulated_run import LinearCost

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.ledger import Entry
from llmsched.engine.scheduler.preemption import ASSUMED_COPY_RATE, ASSUMED_PREFILL_RATE, MeasuredCosts


def crowded(swap_blocks: int = 20, **knobs: Any) -> tuple[Harness, list[Request]]:
    """Run two requests of seven blocks each in a pool of ten; the second is preempted once."""
    harness = Harness(10, output_prediction="none", swap_blocks=swap_blocks, **knobs)
    return harness, [harness.add(make_request(f"p{i}", tokens(48, seed=i), 64, arrival=float(i))) for i in range(2)]


def computed_tokens(harness: Harness) -> int:
    return sum(plan.num_tokens for plan in harness.executor.plans)


def entry_of(harness: Harness, request: Request, what: str) -> Entry:
    return next(entry for entry in harness.scheduler.ledger.entries(request.request_id) if entry.what == what)


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_request_computes_nothing_twice(caching: bool) -> None:
    harness, pair = crowded(preemption_mode="swap", caching=caching)
    while not pair[1].num_preemptions:
        harness.step()
    assert pair[1].status is RequestStatus.SWAPPED
    harness.run()
    assert_right(*pair)
    assert computed_tokens(harness) == 2 * (48 + 63)
    counters = harness.scheduler.counters
    assert (counters.num_preemptions, counters.num_swapped_out, counters.num_swapped_in) == (1, 1, 1)
    assert counters.recomputed_tokens == 0
    moved = [(len(plan.swap_out), len(plan.swap_in)) for plan in harness.executor.plans]
    out, back = (step for step in moved if any(step))
    assert out == (5, 0)
    assert back[0] == 0
    assert 0 < back[1] <= 5


def test_recomputation_counts_what_is_computed_twice() -> None:
    harness, pair = crowded(swap_blocks=0, caching=False)
    harness.run()
    assert_right(*pair)
    assert harness.scheduler.counters.recomputed_tokens == computed_tokens(harness) - 2 * (48 + 63)
    assert harness.scheduler.counters.num_swapped_out == 0


def test_without_room_a_victim_is_recomputed() -> None:
    harness, pair = crowded(swap_blocks=4, preemption_mode="swap")
    harness.run()
    assert_right(*pair)
    assert entry_of(harness, pair[1], "preempted").details["how"] == "recompute"
    assert harness.scheduler.counters.num_swapped_out == 0


@pytest.mark.parametrize(("seconds", "swaps"), [(0.0, 1), (0.5, 0)])
def test_auto_takes_what_costs_less(seconds: float, swaps: int) -> None:
    """A prefill step takes as long as others, so the cost of a prefill token is the one measured before any decode."""
    harness, pair = crowded()
    harness.scheduler.preemption.costs.learn(StepPlan((), swap_out=[(0, 0)]), StepResult([], 1.0, seconds))
    for _ in range(20):
        harness.scheduler.preemption.costs.learn(plan_of(100), StepResult([], 3.0))
    harness.run()
    assert_right(*pair)
    assert harness.scheduler.counters.num_swapped_out == swaps


def test_the_ledger_has_reason_and_cost() -> None:
    harness, pair = crowded(preemption_mode="swap")
    harness.executor.per_swapped_block = 0.001
    harness.run()
    details = entry_of(harness, pair[1], "preempted").details
    assert details["reason"] == "memory"
    assert (details["how"], details["swapped_blocks"]) == ("swap", 5)
    assert details["cost_ms"] == pytest.approx(1e3 * 2 * 5 * BLOCK_BYTES / ASSUMED_COPY_RATE, abs=1e-3)
    assert harness.scheduler.preemption.costs.block_copy.per_unit == pytest.approx(0.001)
    told = [entry.what for entry in harness.scheduler.ledger.entries(pair[1].request_id)]
    assert told == ["queued", "admitted", "computed", "preempted", "does not fit", "admitted", "computed", "finished"]
    back = [e for e in harness.scheduler.ledger.entries(pair[1].request_id) if e.what == "admitted"][1]
    assert back.details["restored_blocks"] == sum(len(plan.swap_in) for plan in harness.executor.plans)


def test_aborting_a_swapped_request_frees_its_slots() -> None:
    harness, pair = crowded(preemption_mode="swap")
    while pair[1].status is not RequestStatus.SWAPPED:
        harness.step()
    harness.scheduler.finish(pair[1], FinishReason.ABORT)
    harness.scheduler.check_integrity()
    assert harness.scheduler.kv.swap.num_free == 20
    harness.run()
    assert_right(pair[0])


def test_a_class_victim_whose_blocks_stay_in_the_cache_is_not_copied() -> None:
    harness = Harness(64, max_num_seqs=1, swap_blocks=20)
    harness.scheduler.preemption.costs.learn(StepPlan((), swap_out=[(0, 0)]), StepResult([], 1.0, 1.0))
    low = harness.add(make_request("low", tokens(32), 40, priority=1))
    for _ in range(3):
        harness.step()
    high = harness.add(make_request("high", tokens(20, seed=1), 4, arrival=3.0))
    harness.run()
    assert_right(low, high)
    details = entry_of(harness, low, "preempted").details
    assert (details["reason"], details["how"], details["lost_tokens"]) == ("class", "recompute", 2)


def test_a_request_is_not_scheduled_in_the_step_in_which_it_was_preempted() -> None:
    """Otherwise the fast lane would give it back the place that it had to give up."""
    harness = Harness(64, max_num_seqs=1, fast_lane_prompt=50)
    low = harness.add(make_request("low", tokens(32), 40, priority=1))
    for _ in range(3):
        harness.step()
    high = harness.add(make_request("high", tokens(60, seed=1), 4, arrival=3.0))
    harness.step()
    assert (high.status, low.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    harness.run()
    assert_right(low, high)
    assert low.num_preemptions == 1


def test_the_cheapest_loss_goes_first() -> None:
    """Of equal classes, not the request with the most tokens to compute again."""
    harness = Harness(24, budget=256, output_prediction="none", headroom=0.0)
    first = harness.add(make_request("first", tokens(32), 100, arrival=0.0))
    long = harness.add(make_request("long", tokens(200, seed=1), 60, arrival=1.0))
    short = harness.add(make_request("short", tokens(60, seed=2), 60, arrival=2.0))
    while not long.num_preemptions + short.num_preemptions:
        harness.step()
    assert (first.num_preemptions, long.num_preemptions, short.num_preemptions) == (0, 0, 1)
    harness.run()
    assert_right(first, long, short)


def test_a_shared_beginning_is_no_loss() -> None:
    """Of two requests with equal token counts, the victim is the one whose prefix another request holds too."""
    harness = Harness(23, budget=512, output_prediction="none", headroom=0.0)
    first = harness.add(make_request("first", tokens(96), 150, arrival=0.0))
    harness.step()
    own = harness.add(make_request("own", tokens(120, seed=1), 60, arrival=2.0))
    shared = harness.add(make_request("shared", [*tokens(96), *tokens(24, seed=2)], 60, arrival=1.0))
    while not own.num_preemptions + shared.num_preemptions:
        harness.step()
    assert (own.num_preemptions, shared.num_preemptions) == (0, 1)
    harness.run()
    assert_right(first, own, shared)


def plan_of(num_tokens: int) -> StepPlan:
    row: Any = make_request("r", [1] * num_tokens)
    return StepPlan([ScheduledRow(row, 0, num_tokens, None, True)])  # type: ignore[arg-type]


def test_rates_are_what_was_measured() -> None:
    costs = MeasuredCosts(block_bytes=80_000)
    assert costs.prefill_token.per_unit == 1 / ASSUMED_PREFILL_RATE
    assert costs.block_copy.per_unit == 80_000 / ASSUMED_COPY_RATE
    for _ in range(50):
        costs.learn(plan_of(1), StepResult([RowResult()], 0.010))
        costs.learn(plan_of(101), StepResult([RowResult()], 0.012))
    assert costs.prefill_token.per_unit == pytest.approx(20e-6)
    swaps = StepPlan(plan_of(1).rows, swap_out=[(0, 0)] * 3, swap_in=[(0, 0)])
    for _ in range(3):
        costs.learn(swaps, StepResult([RowResult()], 0.110, swap_elapsed=0.100))
    assert costs.block_copy.per_unit == pytest.approx(0.025)
    assert costs.prefill_token.per_unit == pytest.approx(20e-6), "copies are no computing"
    for _ in range(1000):
        costs.block_copy.fade()
    assert costs.block_copy.per_unit == pytest.approx(80_000 / ASSUMED_COPY_RATE, rel=0.01), "worth another try"
    for _ in range(1000):
        costs.learn(plan_of(101), StepResult([RowResult()], 0.014))
    assert costs.prefill_token.per_unit == pytest.approx(40e-6, rel=0.01), "what is long ago does not count"


def test_copies_that_were_slow_once_are_tried_again_some_time() -> None:
    harness, pair = crowded()
    harness.step()
    preemption = harness.scheduler.preemption
    preemption.costs.learn(StepPlan((), swap_out=[(0, 0)]), StepResult([], 1.0, 1.0))
    for _ in range(20):
        preemption.costs.learn(plan_of(100), StepResult([], 3.0))
    ways = [preemption.decide(pair[0], None).swap for _ in range(600)]
    assert not ways[0]
    assert ways[-1]


@pytest.mark.parametrize("priority", [0, 1])
def test_a_victim_of_memory_comes_back_before_its_class_and_after_those_above(priority: int) -> None:
    """A preempted request returns to the queue ahead of a request of its class that it had passed."""
    harness = Harness(12, budget=256, output_prediction="none", headroom=0.0)
    running = harness.add(make_request("running", tokens(60), 100, arrival=0.0))
    harness.step()
    large = harness.add(make_request("large", tokens(150, seed=1), 4, arrival=1.0))
    small = harness.add(make_request("small", tokens(20, seed=2), 60, arrival=2.0, priority=priority))
    while not small.num_preemptions:
        harness.step()
    assert large.status is RequestStatus.WAITING
    assert (harness.scheduler.waiting.first is small) is (priority == 0)
    harness.run()
    assert_right(running, large, small)


def test_a_victim_of_class_comes_back_before_its_class_too() -> None:
    harness = Harness(12, max_num_seqs=2, output_prediction="none", headroom=0.0)
    harness.add(make_request("running", tokens(60), 100, arrival=0.0))
    harness.step()
    large = harness.add(make_request("large", tokens(150, seed=1), 4, arrival=1.0, priority=1))
    small = harness.add(make_request("small", tokens(20, seed=2), 60, arrival=2.0, priority=1))
    harness.step()
    assert small.status is RequestStatus.RUNNING
    urgent = harness.add(make_request("urgent", tokens(20, seed=3), 4, arrival=3.0))
    harness.step()
    assert small.num_preemptions == 1
    assert list(harness.scheduler.waiting) == [urgent, small, large]
    harness.run()
    assert_right(large, small, urgent)


def test_simulated_copies_take_their_time() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(LinearCost(0.010, 0, 0, 0), clock, per_swapped_block=0.002)
    result = executor.execute(StepPlan((), swap_out=[(0, 0), (1, 1)], swap_in=[(2, 2)]))
    assert (result.elapsed, result.swap_elapsed, clock.now) == pytest.approx((0.016, 0.006, 0.016))


def test_settings_that_say_nothing_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="swap needs host memory; set swap_space"):
        EngineConfig(preemption_mode="swap")
    with pytest.raises(ConfigError, match="has no effect with preemption_mode recompute"):
        EngineConfig(preemption_mode="recompute", swap_space=1 << 30)
    with pytest.raises(ConfigError, match="'pause' is not one of recompute, swap, auto"):
        EngineConfig(preemption_mode="pause")  # type: ignore[arg-type]
    assert EngineConfig(swap_space=1 << 30).preemption_mode == "auto"
