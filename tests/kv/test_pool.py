"""Each block is in one state at a time, and blocks are evicted in the right order.

Why the end of a sequence is evicted before its beginning: a request that holds or finds a block also holds or finds all
blocks in front of it, and releases the end first. So blocks in front of a shared block are shared, and of two blocks of
one rank the one behind was released first, and is evicted or demoted first.
"""

from __future__ import annotations

import pytest

from llmsched.engine.kv.eviction import MAX_SHARED
from llmsched.engine.kv.pool import BlockPool


def pool_of(num_blocks: int, evicted: list[int]) -> BlockPool:
    """Return a pool that appends each block it evicts to `evicted`."""

    def on_evict(block: int) -> list[int]:
        evicted.append(block)
        return []

    return BlockPool(num_blocks, on_evict)


def cached_pool(num_blocks: int, evicted: list[int]) -> BlockPool:
    """Return a pool like `pool_of`, with all blocks used and findable."""
    pool = pool_of(num_blocks, evicted)
    assert pool.allocate(num_blocks) == list(range(num_blocks))
    pool.set_findable(range(num_blocks))
    return pool


def test_states_add_up() -> None:
    evicted: list[int] = []
    pool = pool_of(4, evicted)
    a, b, c = pool.allocate(3)
    pool.set_findable([a, b])
    pool.release([c, b, a])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 2, 0)
    pool.acquire([a, a])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 1, 1)
    pool.check_integrity({a: 2})
    assert sorted(pool.allocate(3)) == sorted({0, 1, 2, 3} - {a})
    assert evicted == [b]


def test_cached_blocks_leave_in_the_order_of_their_release() -> None:
    evicted: list[int] = []
    pool = cached_pool(3, evicted)
    pool.release([2, 0, 1])
    pool.acquire([2])
    pool.release([2])
    pool.allocate(3)
    assert evicted == [0, 1, 2]


def test_shared_blocks_leave_after_private_ones() -> None:
    evicted: list[int] = []
    pool = cached_pool(8, evicted)
    pool.acquire([0, 1], shared=True)
    pool.release([1, 0])
    pool.release(range(7, -1, -1))
    pool.check_integrity({})
    pool.allocate(8)
    assert evicted == [7, 6, 5, 4, 3, 2, 1, 0]
    evicted.clear()
    pool = cached_pool(8, evicted)
    pool.acquire([0, 1], shared=True)
    pool.release([1, 0, 1, 0])
    pool.release([5, 4, 3, 2, 7, 6])
    pool.allocate(8)
    assert evicted == [5, 4, 3, 2, 7, 6, 1, 0], "released first, evicted last"


def test_evicted_block_is_private_again() -> None:
    evicted: list[int] = []
    pool = cached_pool(4, evicted)
    pool.acquire([0], shared=True)
    pool.release([0, 0, 3, 2, 1])
    pool.allocate(4)
    for block in range(4):
        pool.set_findable([block])
    pool.release([0, 1, 2, 3])
    evicted.clear()
    pool.allocate(1)
    assert evicted == [0]


def test_too_many_shared_blocks_become_the_newest_private_ones() -> None:
    evicted: list[int] = []
    pool = cached_pool(16, evicted)
    most = int(MAX_SHARED * 16)
    assert most == 4
    pool.acquire(range(6), shared=True)
    pool.release([5, 4, 3, 2, 1, 0])
    pool.release(range(15, 5, -1))
    pool.release([5, 4, 3, 2, 1, 0])
    pool.check_integrity({})
    pool.allocate(16)
    assert evicted == [*range(15, 5, -1), 5, 4, 3, 2, 1, 0], "ends before beginnings, in every rank"


def test_demoted_block_that_is_found_again_is_shared_again() -> None:
    evicted: list[int] = []
    pool = cached_pool(4, evicted)
    pool.acquire([0, 1], shared=True)
    pool.release([1, 0, 1, 0, 3, 2])
    pool.allocate(1)
    assert evicted == [1], "one shared block of four is allowed, 1 was demoted before 3 and 2 came"
    pool.acquire([0], shared=True)
    pool.release([0])
    pool.allocate(3)
    assert evicted == [1, 3, 2, 0]


def test_touched_block_goes_last_in_its_rank() -> None:
    evicted: list[int] = []
    pool = cached_pool(4, evicted)
    pool.touch([3])
    pool.release([0, 1, 2])
    pool.touch([0])
    pool.touch([3])
    pool.check_integrity({3: 1})
    pool.allocate(3)
    assert evicted == [1, 2, 0]


def test_reset_keeps_what_is_used() -> None:
    pool = cached_pool(3, [])
    pool.acquire([0], shared=True)
    pool.release([0, 0])
    pool.release([1])
    pool.drop_cached()
    pool.check_integrity({2: 1})
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 0, 1)


@pytest.mark.parametrize("held", [{}, {0: 2}, {0: 1, 1: 1}])
def test_integrity_check_sees_wrong_references(held: dict[int, int]) -> None:
    pool = pool_of(2, [])
    block = pool.allocate(1)[0]
    held = {block if key == 0 else 1 - block: count for key, count in held.items()}
    with pytest.raises(AssertionError):
        pool.check_integrity(held)
