"""Pinned prefixes stay in the cache until they expire, up to a cap, without effect on other requests."""

from __future__ import annotations

import pytest
from configs import resolved
from fakes import tokens
from kv_driver import KVDriver

from llmsched.engine.errors import RequestError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.pins import most_pinned_blocks


def filled(driver: KVDriver) -> None:
    """Evict every block that can be evicted."""
    for seed in range(10, 20):
        driver.serve(tokens(driver.kv.pool.num_available * 16, seed=seed))


def test_written_prefix_is_pinned_at_once_and_stays() -> None:
    driver = KVDriver(16, max_pinned_blocks=4)
    driver.serve(tokens(60))
    pin = driver.kv.pins.pin(tokens(50), "", None, now=0.0)
    assert (pin.num_tokens, pin.num_written_tokens) == (48, 48)
    filled(driver)
    assert driver.find(tokens(60)) == 48
    assert driver.kv.pins.num_blocks == driver.kv.pool.num_used == 3
    driver.kv.pool.drop_cached()
    assert driver.find(tokens(60)) == 48
    driver.check()


def test_unwritten_prefix_is_pinned_block_by_block_as_it_is_written() -> None:
    driver = KVDriver(16, max_pinned_blocks=4)
    pin = driver.kv.pins.pin(tokens(48), "", None, now=0.0)
    assert (pin.num_tokens, pin.num_written_tokens) == (48, 0)
    writer = driver.come(tokens(48))
    driver.step({writer: 20})
    assert driver.kv.pins.states()[0].num_written_tokens == 16
    driver.leave(writer)
    filled(driver)
    assert driver.find(tokens(49)) == 16
    driver.serve(tokens(48))
    filled(driver)
    assert driver.find(tokens(49)) == 48
    assert driver.kv.pins.num_waiting == 0


def test_pin_is_for_its_salt_alone() -> None:
    driver = KVDriver(16, max_pinned_blocks=4)
    driver.kv.pins.pin(tokens(16), "a", None, now=0.0)
    driver.serve(tokens(16), salt="b")
    driver.serve(tokens(16), salt="a")
    filled(driver)
    assert (driver.find(tokens(17), "a"), driver.find(tokens(17), "b")) == (16, 0)


def test_pin_expires_and_its_blocks_become_evictable() -> None:
    driver = KVDriver(16, max_pinned_blocks=4)
    driver.serve(tokens(32))
    driver.kv.pins.pin(tokens(32), "", 10.0, now=5.0)
    driver.kv.expire(14.9)
    assert driver.kv.pins.num_blocks == 2
    driver.kv.expire(15.0)
    assert driver.kv.pins.states() == []
    assert driver.kv.pool.num_used == 0
    assert driver.find(tokens(33)) == 32
    filled(driver)
    assert driver.find(tokens(33)) == 0


def test_pinning_again_sets_a_new_ttl() -> None:
    driver = KVDriver(16, max_pinned_blocks=2)
    first = driver.kv.pins.pin(tokens(32), "", 10.0, now=0.0)
    again = driver.kv.pins.pin(tokens(35), "", 10.0, now=5.0)
    assert (again.pin_id, again.expires_at) == (first.pin_id, 15.0)
    assert len(driver.kv.pins.states()) == 1


def test_pins_that_share_blocks_count_them_once() -> None:
    driver = KVDriver(16, max_pinned_blocks=3)
    driver.serve(tokens(48))
    short, long = (driver.kv.pins.pin(tokens(count), "", None, now=0.0) for count in (32, 48))
    assert driver.kv.pins.num_blocks == 3
    driver.check()
    driver.kv.pins.delete(long.pin_id)
    filled(driver)
    assert driver.find(tokens(49)) == 32
    driver.kv.pins.delete(short.pin_id)
    assert driver.kv.pins.num_blocks == driver.kv.pool.num_used == 0
    driver.check()


def test_unwritten_pins_that_overlap_are_counted_once_they_are_written() -> None:
    driver = KVDriver(16, max_pinned_blocks=4)
    driver.kv.pins.pin(tokens(32), "", None, now=0.0)
    driver.kv.pins.pin([*tokens(31), 7], "", None, now=0.0)
    with pytest.raises(RequestError, match="1 more blocks of 16; 4 are pinned, and at most 4 may be"):
        driver.kv.pins.pin(tokens(16, seed=1), "", None, now=0.0)
    driver.serve(tokens(32))
    driver.serve([*tokens(31), 7])
    assert driver.kv.pins.num_blocks == 3
    driver.kv.pins.pin(tokens(16, seed=1), "", None, now=0.0)


def test_a_refused_pin_changes_nothing() -> None:
    driver = KVDriver(16, max_pinned_blocks=2)
    with pytest.raises(RequestError, match="pinning 48 tokens takes 3 more blocks of 16; 0 are pinned, and at most 2"):
        driver.kv.pins.pin(tokens(48), "", None, now=0.0)
    with pytest.raises(RequestError, match="has 15 tokens; only whole blocks are pinned, so it must have at least 16"):
        driver.kv.pins.pin(tokens(15), "", None, now=0.0)
    for ttl in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="ttl must be"):
            driver.kv.pins.pin(tokens(16), "", ttl, now=0.0)
    with pytest.raises(RequestError, match="no pin 'pin-9'; existing pins: none"):
        driver.kv.pins.delete("pin-9")
    assert driver.kv.pins.states() == []
    assert driver.kv.pins.num_waiting == 0


def test_deleting_a_pin_that_waits() -> None:
    driver = KVDriver(16, max_pinned_blocks=2)
    pin = driver.kv.pins.pin(tokens(32), "", None, now=0.0)
    driver.serve(tokens(16))
    driver.kv.pins.delete(pin.pin_id)
    assert driver.kv.pins.num_waiting == driver.kv.pins.num_blocks == 0
    driver.serve(tokens(32))
    driver.check()


def test_pins_leave_room_for_one_request() -> None:
    driver = KVDriver(16, max_pinned_blocks=4)
    driver.kv.pins.pin(tokens(64), "", None, now=0.0)
    driver.serve(tokens(64))
    filled(driver)
    assert driver.kv.pool.num_available == driver.kv.max_request_blocks == 12
    assert driver.kv.pins.num_blocks == 4


def test_cap_is_a_share_that_leaves_room_for_the_longest_request() -> None:
    assert most_pinned_blocks(100, 0.25, 60) == 25
    assert most_pinned_blocks(100, 0.25, 90) == 10
    assert most_pinned_blocks(100, 0.25, 100) == 0
    assert most_pinned_blocks(100, 0.25, 120) == 0


def test_beside_pins_the_longest_request_finds_room_in_every_group_of_layers() -> None:
    layout = KVLayout(16, 1, 2, 40)
    kv = make_kv(resolved(max_model_len=160, max_pinned_share=0.9), 30, layout=layout)
    assert kv.max_request_blocks == layout.num_blocks(160) == 10 + 2 * 4
