"""Hits are exact to the token, copies are safe, and what is being written is not computed twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import make_request, tokens
from kv_driver import KVDriver

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.prefix_cache import MIN_COPIED
from llmsched.engine.kv.prefix_tree import NO_HIT


@pytest.mark.parametrize("common", [16, 17, 19, 20, 27, 31, 32, 33, 36, 40, 47])
def test_hit_is_exact_to_the_token_from_four_on(common: int) -> None:
    driver = KVDriver(16)
    driver.serve(tokens(48))
    prompt = tokens(common) + tokens(40, seed=9)
    copied = common % 16 if common % 16 >= MIN_COPIED else 0
    assert driver.find(prompt) == common // 16 * 16 + copied
    request = driver.come(prompt)
    assert request.num_computed_tokens == common // 16 * 16 + copied
    driver.step({request: 100})


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_at_least_the_last_token_is_computed(length: int) -> None:
    driver = KVDriver(16)
    driver.serve(tokens(64))
    hit = driver.kv.prefix_cache.find(make_request("probe", tokens(length)))
    assert hit.num_tokens == length - 1
    request = driver.come(tokens(length))
    driver.step({request: 100})
    assert request.num_output_tokens == 1


def test_copied_block_stays_findable_as_a_whole_and_is_not_written_twice() -> None:
    driver = KVDriver(16)
    driver.serve(tokens(32))
    again = driver.come(tokens(32))
    assert again.num_computed_tokens == 31
    driver.step({again: 1})
    assert driver.kv.pool.num_used == 2, "the block that was copied gave way to the one that was there"
    driver.leave(again)
    assert driver.find([*tokens(32), 5]) == 32


def test_closest_of_several_is_copied() -> None:
    driver = KVDriver(32)
    for common in (5, 12, 9):
        driver.serve(tokens(16) + tokens(common, seed=2) + tokens(20, seed=50 + common))
    assert driver.find(tokens(16) + tokens(16, seed=2) + tokens(4)) == 28


def test_salt_separates_blocks_being_read_copied_and_written() -> None:
    driver = KVDriver(32)
    driver.serve(tokens(40), salt="a")
    running = driver.come(tokens(70, seed=3), salt="a")
    driver.step({running: 20})
    for prompt in (tokens(40), tokens(70, seed=3)):
        other = make_request("other", prompt, cache_salt="b")
        hit = driver.kv.prefix_cache.find(other)
        assert hit == NO_HIT
        assert driver.kv.prefix_cache.num_coming(other, hit) == 0


def test_prompt_logprobs_skip_the_cache() -> None:
    driver = KVDriver(16)
    driver.serve(tokens(40))
    running = driver.come([*tokens(40), 3])
    asking = make_request("asking", tokens(40))
    asking.sampling = replace(asking.sampling, prompt_logprobs=0)
    assert driver.kv.prefix_cache.find(asking) == NO_HIT
    assert driver.kv.prefix_cache.num_coming(asking, NO_HIT) == 0
    driver.leave(running)


def test_without_caching_nothing_is_found_and_nothing_is_kept() -> None:
    kv = KVManager(16, KVLayout(16), enable_prefix_caching=False, max_pinned_blocks=4)
    request = make_request("a", tokens(40))
    kv.admit(request, kv.prefix_cache.find(request))
    request.num_computed_tokens = 40
    kv.commit(request)
    again = make_request("b", tokens(40))
    assert kv.prefix_cache.find(again) == NO_HIT
    kv.check_integrity([request])
    kv.release(request)
    assert kv.pool.num_free == 16
    assert kv.max_request_blocks == 16, "nothing can be pinned either"


# -- copies ---------------------------------------------------------------------------------------------------


def test_source_that_is_evicted_in_the_same_step_and_written_by_another_is_still_copied_first() -> None:
    driver = KVDriver(5)
    driver.serve(tokens(32))
    one = driver.come([*tokens(28), 7])  # a hit on block 0, copies 12 tokens of block 1
    assert one.num_computed_tokens == 28
    other = driver.come(tokens(48, seed=1))  # takes all that is left, and with it the source
    assert driver.kv.pool.num_available == 0
    source, _ = next(iter(driver.next_copies()))
    assert source in other.table.held_blocks()
    driver.step({other: 48, one: 1})


def test_source_may_become_the_destination_of_a_later_copy() -> None:
    driver = KVDriver(4)
    for seed in range(3):
        driver.serve(tokens(16, seed=seed))
    first = driver.come([*tokens(10), 1])
    plain = driver.come(tokens(5, seed=3))
    last = driver.come([*tokens(12, seed=2), 1])
    assert [request.num_computed_tokens for request in (first, plain, last)] == [10, 0, 12]
    (source, _), (_, destination) = driver.next_copies()
    assert source == destination
    driver.step({last: 1, plain: 5, first: 1})


def test_source_that_is_evicted_to_become_its_own_destination_needs_no_copy() -> None:
    driver = KVDriver(1)
    driver.serve(tokens(16))
    request = driver.come([*tokens(12), 1])
    assert request.num_computed_tokens == 12
    assert driver.next_copies() == []
    driver.step({request: 1})


def test_copy_for_a_request_released_before_the_step_does_not_affect_the_next_request() -> None:
    driver = KVDriver(3)
    driver.serve(tokens(16))
    driver.leave(driver.come([*tokens(8), 1]))
    held = driver.come(tokens(16, seed=4))
    request = driver.come([*tokens(12), 1])
    driver.step({request: 1, held: 16})


def test_a_copied_source_is_evicted_after_unused_blocks() -> None:
    driver = KVDriver(6)
    driver.serve(tokens(16))
    driver.serve(tokens(16, seed=1))
    request = driver.come([*tokens(8), 1])
    driver.step({request: 9})
    driver.leave(request)
    driver.come(tokens(5 * 16, seed=2))
    assert driver.find(tokens(17)) == 16
    assert driver.find(tokens(17, seed=1)) == 0


# -- in flight ------------------------------------------------------------------------------------------------


def in_flight(driver: KVDriver, prompt: list[int]) -> tuple[int, int]:
    """Return (tokens found, tokens that running requests will write)."""
    probe = make_request("probe", prompt)
    hit = driver.kv.prefix_cache.find(probe)
    return hit.num_tokens, driver.kv.prefix_cache.num_coming(probe, hit)


def test_a_prefix_in_flight_is_counted_and_later_found() -> None:
    driver = KVDriver(64)
    writer = driver.come(tokens(200))
    assert in_flight(driver, tokens(200)) == (0, 192)
    assert in_flight(driver, tokens(193)) == (0, 192)
    assert in_flight(driver, tokens(192)) == (0, 176)
    assert in_flight(driver, tokens(100) + tokens(100, seed=1)) == (0, 96)
    assert in_flight(driver, tokens(15) + tokens(100, seed=1)) == (0, 0)
    assert in_flight(driver, tokens(100, seed=1)) == (0, 0)
    driver.step({writer: 70})
    assert in_flight(driver, tokens(200)) == (70, 122)
    driver.step({writer: 130})
    assert in_flight(driver, tokens(193)) == (192, 0)


def test_a_prefix_in_flight_is_gone_with_its_request() -> None:
    driver = KVDriver(64)
    writer = driver.come(tokens(200))
    driver.step({writer: 64})
    driver.leave(writer)
    assert in_flight(driver, tokens(200)) == (64, 0)


def test_block_that_a_running_request_is_filling_is_copied() -> None:
    driver = KVDriver(64)
    first = driver.come(tokens(40), name="first")
    assert driver.find(tokens(40)) == 0, "not computed yet"
    driver.step({first: 40})
    second = driver.come(tokens(40), name="second")
    assert second.num_computed_tokens == 39
    third = driver.come([*tokens(36), 1, 2, 3], name="third")
    assert third.num_computed_tokens == 36
    driver.step({first: 1, second: 1, third: 3})
    assert driver.kv.pool.num_used == 2 + 3, "two whole blocks shared, one of their own each"


def test_blocks_that_still_wait_for_a_copy_are_no_source() -> None:
    driver = KVDriver(64)
    first = driver.come(tokens(40), name="first")
    driver.step({first: 40})
    second = driver.come(tokens(40), name="second")
    driver.leave(first)
    assert driver.find(tokens(40)) == 32, "the copy into the block of the second has not been made yet"
    driver.step({second: 1})
    assert driver.find(tokens(40)) == 39


# -- block boundaries -----------------------------------------------------------------------------------------


def test_decodes_inside_a_block_change_nothing() -> None:
    driver = KVDriver(64)
    request = driver.come(tokens(40))
    for _ in range(60):
        table = request.table
        missing, findable = request.table.num_growing(request.num_tokens), table.num_findable
        assert (missing > 0) == (request.num_tokens > table.capacity)
        driver.step({request: 100})
        assert (table.num_findable > findable) == (request.num_computed_tokens // 16 > findable)
        assert table.commit_at == (table.num_findable + 1) * 16
        assert table.capacity == len(table) * 16


# -- eviction -------------------------------------------------------------------------------------------------


def test_prefix_that_another_request_used_outlives_newer_private_history() -> None:
    driver = KVDriver(12)
    system = tokens(32)
    driver.serve(system + tokens(16, seed=1))
    driver.serve(system + tokens(16, seed=2))
    for seed in range(10, 20):
        driver.serve(tokens(64, seed=seed))
    assert driver.find(system + tokens(16, seed=3)) == 32


def test_a_preempted_request_that_returns_shares_no_blocks() -> None:
    driver = KVDriver(12)
    request = driver.come(tokens(48))
    driver.step({request: 48})
    driver.leave(request)
    request.num_preemptions += 1
    driver.admit(request)
    assert request.num_computed_tokens == 48
    driver.step({request: 1})
    driver.leave(request)
    for seed in range(10, 20):
        driver.serve(tokens(64, seed=seed))
    assert driver.find(tokens(48)) == 0


def test_block_is_shared_only_with_all_in_front_of_it() -> None:
    driver = KVDriver(12)
    late = driver.come(tokens(48), name="late")
    driver.leave(late)
    first = driver.come(tokens(48), name="first")
    driver.step({first: 16})
    late.num_preemptions += 1
    assert driver.admit(late).num_tokens == 16, "written by another, but found on a return"
    driver.step({first: 32, late: 32})
    assert first.table.held_blocks() == late.table.held_blocks()
    driver.leave(first)
    driver.leave(late)
    driver.serve(tokens(12 * 16, seed=5))


def test_prefix_with_an_evicted_beginning_is_no_hit() -> None:
    driver = KVDriver(8)
    driver.serve([*tokens(48), 1])
    driver.serve(tokens(6 * 16, seed=3))
    assert driver.find([*tokens(48), 1]) == 32, "the end goes first"
    driver.serve(tokens(8 * 16, seed=4))
    assert driver.find([*tokens(48), 1]) == 0


def test_encoded_tokens_follow_the_sequence() -> None:
    driver = KVDriver(16)
    request = driver.come(tokens(20))
    driver.step({request: 20})
    for _ in range(20):
        driver.step({request: 1})
    driver.leave(request)
    request.num_preemptions += 1
    assert driver.admit(request).num_tokens == 32
    driver.step({request: 100})
