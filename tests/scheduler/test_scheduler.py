"""Scheduler with a fake executor that checks the KV of every row; tokens are compared with a reference."""

from __future__ import annotations

import pytest
from fakes import Harness, assert_right, make_request, tokens

from llmsched.engine.request import FinishReason


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
def test_lone_prompt_of_whole_blocks_generates_to_its_limit(length: int) -> None:  # A02
    harness = Harness(num_blocks=8)
    request = harness.add(make_request("a", tokens(length), 20))
    harness.run()
    assert_right(request)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_repeated_prompt_computes_at_least_one_token(length: int) -> None:  # A01
    harness = Harness(num_blocks=32)
    hits = []
    for round_ in range(3):
        request = harness.add(make_request(f"r{round_}", tokens(length)))
        harness.run()
        assert_right(request)
        hits.append(request.num_cached_tokens)
    assert hits == [0, length - 1, length - 1]


def test_recomputed_last_block_stays_findable() -> None:  # A01
    harness = Harness(num_blocks=32)
    for round_ in range(2):
        harness.add(make_request(f"r{round_}", tokens(32), 1))
        harness.run()
    longer = harness.add(make_request("longer", tokens(32) + tokens(16, seed=5)))
    harness.run()
    assert longer.num_cached_tokens == 32
    assert_right(longer)


def test_equal_prompts_in_one_step_share_their_blocks_afterwards() -> None:  # A03
    harness = Harness(num_blocks=32, budget=256)
    pair = [harness.add(make_request(f"p{i}", tokens(40), 20)) for i in range(2)]
    harness.step()
    assert pair[1].num_computed_tokens == 0, "waits for what the first is writing"
    harness.step()
    assert pair[1].num_cached_tokens == 39
    assert harness.scheduler.kv.pool.num_used == 2 + 2, "two whole blocks shared, one partial block each"
    harness.run()
    assert_right(*pair)
    assert sum(plan.num_tokens for plan in harness.executor.plans) == 40 + 1 + 2 * 19


def test_blocks_are_found_only_after_they_are_written() -> None:  # A05
    harness = Harness(num_blocks=64, budget=64)
    first = harness.add(make_request("first", tokens(512)))
    harness.step()
    harness.scheduler.finish(first, FinishReason.ABORT)
    second = harness.add(make_request("second", tokens(512)))
    harness.run()
    assert second.num_cached_tokens == 64
    assert_right(second)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([66] * 16 + [7, 8, 9], [322] * 16 + [7, 8, 9]),
        ([1, 23] * 8 + [5], [12, 3] * 8 + [5]),
        ([5] * 16 + [6], [5 + 2**16] * 16 + [6]),
        (tokens(33), tokens(34)[1:]),
    ],
)
def test_different_ids_never_share(one: list[int], two: list[int]) -> None:  # A06
    harness = Harness(num_blocks=16)
    harness.add(make_request("one", one))
    harness.run()
    other = harness.add(make_request("two", two))
    harness.run()
    assert other.num_cached_tokens == 0
    assert_right(other)


def test_cache_salt_separates() -> None:
    harness = Harness(num_blocks=16)
    harness.add(make_request("one", tokens(40), cache_salt="a"))
    harness.run()
    other = harness.add(make_request("two", tokens(40), cache_salt="b"))
    harness.run()
    assert other.num_cached_tokens == 0


def test_eviction_takes_the_end_of_a_prefix_first() -> None:  # A08
    harness = Harness(num_blocks=8)
    harness.add(make_request("kept", tokens(48), 2))
    harness.run()
    harness.add(make_request("filler", tokens(16 * 5 + 8, seed=3), 2))
    harness.run()
    again = harness.add(make_request("again", [*tokens(48), 1], 2))
    harness.run()
    assert again.num_cached_tokens == 32, "only the last of three blocks had to go"
    assert_right(again)


def test_preempted_request_goes_on_where_it_was() -> None:  # A10
    harness = Harness(num_blocks=10, output_prediction="none")
    pair = [harness.add(make_request(f"p{i}", tokens(48, seed=i), 64, arrival=i)) for i in range(2)]
    harness.run()
    assert_right(*pair)
    assert pair[0].num_preemptions == 0
    assert pair[1].num_preemptions == 1
    assert pair[1].num_prompt_tokens == 48


def test_recomputation_is_no_prefix_hit() -> None:
    harness = Harness(num_blocks=12, max_num_seqs=8, output_prediction="none")
    for i in range(12):
        harness.add(make_request(f"r{i}", tokens(40, seed=i + 1), 40, arrival=i))
    harness.run()
    counters = harness.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.recomputed_tokens > 0
    assert counters.prefix_hit_tokens == 0
    assert counters.prefix_queried_tokens == 12 * 40


def test_mixed_short_and_long_prompts_in_small_steps() -> None:  # A13
    harness = Harness(num_blocks=200, budget=32)
    requests = [harness.add(make_request(f"s{i}", tokens(8, seed=i), 16, arrival=i)) for i in range(14)]
    requests += [harness.add(make_request(f"l{i}", tokens(400, seed=50 + i), 16, arrival=20 + i)) for i in range(2)]
    harness.run()
    assert_right(*requests)


def test_request_with_no_tokens_to_generate_only_computes_its_prompt() -> None:
    harness = Harness(num_blocks=8)
    request = harness.add(make_request("a", tokens(20), 0))
    harness.run()
    assert request.num_output_tokens == 0
    assert request.finish_reason is FinishReason.LENGTH


def test_prompt_that_waits_for_memory_is_not_computed_in_vain() -> None:
    harness = Harness(num_blocks=40, budget=64)
    first = harness.add(make_request("first", tokens(400), 100))
    for _ in range(8):
        harness.step()
    second = harness.add(make_request("second", tokens(400, seed=1), 20, arrival=8))
    harness.run()
    assert_right(first, second)
    assert first.num_preemptions == second.num_preemptions == 0
    assert sum(plan.num_tokens for plan in harness.executor.plans) == 400 + 99 + 400 + 19


def test_two_prompts_that_fill_the_pool_half_way_both_end() -> None:
    harness = Harness(num_blocks=32, budget=64)
    pair = [harness.add(make_request(f"p{i}", tokens(n, seed=i), 4, arrival=i)) for i, n in enumerate((400, 300))]
    harness.run()
    assert_right(*pair)


def test_thirty_requests_in_a_pool_for_a_few() -> None:
    harness = Harness(num_blocks=20, budget=256, max_num_seqs=30, output_prediction="none")
    requests = [harness.add(make_request(f"r{i}", tokens(32, seed=i), 128, arrival=i)) for i in range(30)]
    harness.run()
    assert_right(*requests)


def test_a_low_class_is_preempted_first_and_all_end() -> None:
    harness = Harness(num_blocks=12, output_prediction="none")
    low = harness.add(make_request("low", tokens(32, seed=1), 64, arrival=0, priority=5))
    high = [harness.add(make_request(f"high{i}", tokens(32, seed=2 + i), 64, arrival=1 + i)) for i in range(2)]
    harness.run()
    assert_right(low, *high)
    assert low.num_preemptions > 0
    assert high[0].num_preemptions == 0


def test_more_running_than_budget_never_happens() -> None:
    harness = Harness(num_blocks=200, budget=4, max_num_seqs=100)
    requests = [harness.add(make_request(f"r{i}", tokens(20, seed=i), 30, arrival=i)) for i in range(20)]
    harness.run()
    assert_right(*requests)


def test_aborted_requests_give_everything_back() -> None:
    harness = Harness(num_blocks=64, budget=64)
    requests = [harness.add(make_request(f"r{i}", tokens(100, seed=i), 50, arrival=i)) for i in range(6)]
    for _ in range(3):
        harness.step()
    for request in requests:
        harness.scheduler.finish(request, FinishReason.ABORT)
        harness.scheduler.check_integrity()
    assert harness.scheduler.kv.pool.num_used == 0
    assert not harness.scheduler.has_work()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(767, 1, True), (768, 1, True), (768, 2, False), (769, 1, False)]
)
def test_what_can_never_fit(prompt: int, max_tokens: int, fits: bool) -> None:  # D01
    assert Harness(num_blocks=48).scheduler.fits_alone(prompt, max_tokens) is fits
