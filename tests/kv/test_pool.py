"""Blocks are in one place at a time."""

from __future__ import annotations

import pytest

from llmsched.engine.kv.pool import BlockPool


def test_states_add_up() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    a, b, c = pool.allocate(3)
    pool.set_findable(a)
    pool.set_findable(b)
    pool.release([c, b, a])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 2, 0)
    pool.acquire([a, a])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 1)
    pool.check_integrity({a: 2})
    assert sorted(pool.allocate(3)) == sorted({0, 1, 2, 3} - {a})
    assert evicted == [b]


def test_cached_blocks_leave_in_the_order_of_their_release() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, evicted.append)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.set_findable(block)
    pool.release([blocks[2], blocks[0], blocks[1]])
    pool.acquire([blocks[2]])
    pool.release([blocks[2]])
    pool.allocate(3)
    assert evicted == [blocks[0], blocks[1], blocks[2]]


def test_reset_keeps_what_is_used() -> None:
    pool = BlockPool(3, lambda _: None)
    a, b, _ = pool.allocate(3)
    for block in (a, b):
        pool.set_findable(block)
    pool.release([a])
    pool.drop_cached()
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 2)


@pytest.mark.parametrize("held", [{}, {0: 2}, {0: 1, 1: 1}])
def test_integrity_check_sees_wrong_references(held: dict[int, int]) -> None:
    pool = BlockPool(2, lambda _: None)
    block = pool.allocate(1)[0]
    held = {block if key == 0 else 1 - block: count for key, count in held.items()}
    with pytest.raises(AssertionError):
        pool.check_integrity(held)
