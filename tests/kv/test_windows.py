"""Blocks of sliding-window layers: how they are held, found again and evicted."""

from __future__ import annotations

import pytest
from fakes import Harness, assert_right, make_request, tokens
from kv_driver import KVDriver

from llmsched.engine.errors import RequestError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.misses import MissKind
from llmsched.engine.kv.prefix_tree import blocks_of, encode
from llmsched.engine.request import Request

#: Of a window of 40 tokens, three whole blocks of 16 are kept besides the one that is being filled.
LAYOUT = KVLayout(16, 1, 2, 40)


def driver_of(num_blocks: int, **more: int) -> KVDriver:
    return KVDriver(num_blocks, layout=LAYOUT, **more)


def held(request: Request) -> tuple[int, int]:
    """Return the blocks held by each full-attention group and by each sliding-window group."""
    table = request.table
    return len(table), table.window_end - table.window_start


def forget_windows(driver: KVDriver, prompt: list[int], first: int, end: int) -> None:
    """Evict all cached blocks but the prompt's, and the prompt's window blocks `first` to before `end`."""
    pool, nodes = driver.kv.pool, driver.kv.prefix_cache.tree.match(encode(prompt), "", len(prompt) // 16)
    kept = blocks_of(nodes, nodes[:first] + nodes[end:])
    pool.acquire(kept)
    pool.release(pool.allocate(pool.num_available))
    pool.release(reversed(kept))
    driver.check()


def test_a_sequence_holds_no_more_of_a_window_however_long_it_grows() -> None:
    driver = driver_of(200)
    request = driver.come(tokens(20))
    driver.step({request: 20})
    for _ in range(500):
        driver.step({request: 1})
        full, window = held(request)
        assert full == -(-request.num_computed_tokens // 16)
        assert window == min(full, 3 if request.num_computed_tokens % 16 == 0 else 4)
        assert driver.kv.pool.num_used == full + 2 * window


def test_a_long_prompt_has_room_for_its_chunk_while_that_is_computed() -> None:
    driver = driver_of(400)
    request = driver.come(tokens(1000))
    assert held(request) == (63, 4)
    assert driver.kv.pool.num_used == LAYOUT.num_blocks(1000)
    assert driver.kv.blocks.reach(request, 500) == 500
    assert held(request) == (63, 32)
    driver.step({request: 500})
    assert held(request)[1] == 3 + 1, "the block that is being filled, and what the next token sees"
    driver.step({request: 500})
    assert held(request) == (63, 4)


def test_a_chunk_is_shortened_to_what_there_is_room_for() -> None:
    driver = driver_of(63 + 2 * 4 + 3)
    request = driver.come(tokens(1000))
    assert driver.kv.pool.num_available == 3
    assert driver.kv.blocks.reach(request, 1000) == 5 * 16, (
        "one more block for each of two groups, and one that is left"
    )
    for _ in range(200):
        if request.num_computed_tokens == 1000:
            break
        driver.step({request: 1000})
    assert request.num_tokens == 1001


def test_what_has_left_the_window_can_be_found_until_it_is_evicted() -> None:
    driver = driver_of(200)
    driver.serve(tokens(400))
    assert driver.find([*tokens(400), 1]) == 400
    assert driver.find([*tokens(200), *tokens(50, seed=1)]) == 200, "12 blocks, and half of one copied in every group"
    forget_windows(driver, tokens(400), 12, 13)
    assert driver.find([*tokens(400), 1]) == 400, "that is not in the window of token 400"
    assert driver.find([*tokens(200), *tokens(50, seed=1)]) == 192, "half of a block, but not in every group"
    assert driver.find([*tokens(208), *tokens(50, seed=1)]) == 192
    assert driver.find([*tokens(240), *tokens(50, seed=1)]) == 192
    assert driver.find([*tokens(256), *tokens(50, seed=1)]) == 256


def test_a_hit_that_ends_where_a_window_is_gone_says_evicted() -> None:
    driver = driver_of(200)
    driver.serve(tokens(400))
    forget_windows(driver, tokens(400), 20, 25)
    request = make_request("again", [*tokens(400), 1])
    found = driver.kv.prefix_cache.find(request)
    assert (found.num_tokens, found.num_alike) == (320, 400)
    miss = driver.kv.prefix_cache.classify(request, found)
    assert (miss.kind, miss.position, miss.age) == (MissKind.EVICTED, 320, None)


def test_evicted_window_blocks_are_replaced_by_the_next_request_that_writes_them() -> None:
    driver = driver_of(200)
    driver.serve(tokens(400))
    forget_windows(driver, tokens(400), 0, 25)
    assert driver.find([*tokens(400), 1]) == 0
    used = len(driver.kv.prefix_cache.tree)
    driver.serve(tokens(400))
    assert driver.find([*tokens(400), 1]) == 400
    assert len(driver.kv.prefix_cache.tree) == used + 2 * 25, "what keeps all tokens was there, and is not kept twice"


def test_a_block_that_is_evicted_takes_those_of_its_windows_with_it() -> None:
    driver = driver_of(30)
    driver.serve(tokens(160))
    assert driver.kv.pool.num_cached == 30
    driver.serve(tokens(64, seed=3))
    driver.kv.pool.drop_cached()
    assert driver.kv.pool.num_free == 30
    assert len(driver.kv.prefix_cache.tree) == 0


def test_swap_takes_the_window_and_leaves_what_others_hold() -> None:
    driver = driver_of(200, num_host_blocks=40)
    other = driver.come(tokens(320))
    driver.step({other: 320})
    request = driver.come([*tokens(320), *tokens(100, seed=1)])
    driver.step({request: 200})
    assert driver.kv.num_swapped(request) == 7 + 2 * 4, "7 of its own, and what is in the window"
    driver.swap_out(request)
    driver.step({other: 1})
    driver.admit(request)
    assert request.num_computed_tokens == 420
    for _ in range(60):
        driver.step({request: 1, other: 1})
    assert driver.kv.swap.num_free == 40


def test_a_window_is_restored_from_host_memory_while_others_hold_the_full_blocks() -> None:
    driver = driver_of(200, num_host_blocks=40)
    request, other = driver.come(tokens(400), name="request"), driver.come(tokens(400), name="other")
    driver.step({request: 320, other: 400})
    assert request.num_computed_tokens == 320
    assert driver.kv.num_swapped(request) == 2 * 3
    driver.swap_out(request)
    forget_windows(driver, tokens(400), 0, 22)
    assert driver.find(tokens(400)) == 0
    driver.admit(request)
    assert (request.num_computed_tokens, request.table.num_findable) == (320, 20), "24 are known"
    driver.step({request: 80, other: 1})
    assert driver.kv.swap.num_free == 40


@pytest.mark.parametrize("full_groups", [0, 1])
def test_only_the_window_is_findable_after_restoring_it_from_host_memory(full_groups: int) -> None:
    """Nodes before the window have no window blocks."""
    driver = KVDriver(200, num_host_blocks=100, layout=KVLayout(16, full_groups, 2, 40))
    request = driver.come(tokens(400))
    driver.step({request: 320})
    driver.swap_out(request)
    driver.kv.pool.drop_cached()
    driver.admit(request)
    assert request.num_computed_tokens == 320
    driver.step({request: 1})
    assert request.table.num_findable == 20
    assert driver.find([*tokens(320), 1]) == 320
    assert driver.find([*tokens(304), 1]) == 0


def test_with_windows_alone_all_kv_is_restored_from_host_memory() -> None:
    driver = KVDriver(60, num_host_blocks=10, layout=KVLayout(16, 0, 1, 40))
    request = driver.come(tokens(400))
    driver.step({request: 320})
    driver.swap_out(request)
    forget_windows(driver, tokens(400), 0, 18)
    driver.admit(request)
    assert request.num_computed_tokens == 320
    driver.kv.pool.drop_cached()
    driver.step({request: 16})
    assert driver.find([*tokens(336), 1]) == 336
    driver.leave(request)
    driver.kv.pool.drop_cached()
    assert not driver.kv.prefix_cache.tree._roots


def test_what_is_found_again_after_a_preemption_is_all_or_nothing() -> None:
    driver = driver_of(60)
    request = driver.come(tokens(160))
    driver.step({request: 160})
    other = driver.come([*tokens(160), 1])
    available = driver.kv.pool.num_available
    assert available < 60
    assert driver.kv.num_kept(request, available) == 10
    assert driver.kv.num_kept(request, available + 1) == driver.kv.num_kept(request, None) == 0
    driver.leave(other)


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
def test_a_pool_for_one_long_request_is_enough_whatever_chunks_it_comes_in(caching: bool) -> None:
    harness = Harness(LAYOUT.num_blocks(500), budget=256, caching=caching, layout=LAYOUT)
    request = harness.add(make_request("long", tokens(400), 101))
    while harness.scheduler.has_work():
        harness.step()
        assert harness.scheduler.kv.pool.num_used <= LAYOUT.num_blocks(request.num_tokens)
    assert_right(request)


def test_a_pin_holds_the_window_behind_its_prefix() -> None:
    driver = driver_of(60, max_pinned_blocks=40)
    pin = driver.kv.pins.pin(tokens(160), "", None, now=0.0)
    driver.serve(tokens(160))
    assert driver.kv.pins.num_blocks == driver.kv.pool.num_used == 10 + 2 * 3
    for seed in range(10, 20):
        driver.serve(tokens(200, seed=seed))
    assert driver.find([*tokens(160), *tokens(30, seed=1)]) == 160
    assert driver.kv.pins.states()[0].num_written_tokens == 160
    driver.kv.pins.delete(pin.pin_id)
    assert driver.kv.pool.num_used == 0


def test_a_pin_waits_for_the_windows_of_what_is_known() -> None:
    driver = driver_of(200, max_pinned_blocks=40)
    driver.serve(tokens(400))
    forget_windows(driver, tokens(400), 0, 25)
    pin = driver.kv.pins.pin(tokens(160), "", None, now=0.0)
    assert pin.num_written_tokens == 7 * 16, "up to where it is to hold windows"
    driver.serve(tokens(160))
    assert driver.kv.pins.states()[0].num_written_tokens == 160
    assert driver.kv.pins.num_waiting == 0


def test_pins_count_their_windows_against_the_cap() -> None:
    driver = driver_of(60, max_pinned_blocks=10 + 2 * 3 - 1)
    with pytest.raises(RequestError, match="takes 16 more blocks of 16; 0 are pinned, and at most 15 may be"):
        driver.kv.pins.pin(tokens(160), "", None, now=0.0)
    driver.kv.pins.pin(tokens(144), "", None, now=0.0)


def test_with_windows_alone_nodes_without_blocks_stay_while_they_have_children() -> None:
    driver = KVDriver(60, max_pinned_blocks=4, layout=KVLayout(16, 0, 1, 40))
    driver.serve(tokens(400))
    assert driver.kv.pool.num_cached == 25
    assert driver.find([*tokens(400), 1]) == 400
    forget_windows(driver, tokens(400), 0, 22)
    assert driver.kv.pool.num_cached == 3
    assert driver.find([*tokens(400), 1]) == 400, "three blocks are all that it sees"
    assert driver.find([*tokens(380), 1]) == 0
    request = driver.come([*tokens(400), 1])
    for _ in range(100):
        driver.step({request: 1})
    assert driver.kv.pool.num_used == 4
    driver.leave(request)
    driver.kv.pins.pin(tokens(400), "", None, now=0.0)
    driver.kv.pool.drop_cached()
    assert driver.find([*tokens(400), 1]) == 400
    driver.kv.pins.delete("pin-1")
    driver.kv.pool.drop_cached()
    assert len(driver.kv.prefix_cache.tree) == 0
    assert not driver.kv.prefix_cache.tree._roots


def test_with_windows_alone_a_waiting_pin_restarts_if_its_nodes_are_evicted() -> None:
    """The pin will hold the last three of its ten blocks; the four blocks that exist come before these."""
    driver = KVDriver(60, max_pinned_blocks=4, layout=KVLayout(16, 0, 1, 40))
    driver.serve(tokens(64))
    assert driver.kv.pins.pin(tokens(160), "", None, now=0.0).num_written_tokens == 64
    driver.kv.pool.drop_cached()
    driver.serve(tokens(160))
    assert driver.kv.pins.states()[0].num_written_tokens == 160
    assert driver.kv.pool.num_used == 3


def test_sources_that_become_destinations_change_places() -> None:
    """If no other blocks are left, the source's blocks become the copy's, in the same groups."""
    driver = driver_of(3)
    driver.serve(tokens(16))
    request = driver.come([*tokens(12), 1])
    assert request.num_computed_tokens == 12
    assert driver.next_copies() == []
    driver.step({request: 1})
