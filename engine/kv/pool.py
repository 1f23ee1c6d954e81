"""Pool of fixed-size KV blocks: reference counts, free and cached blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from llmsched.engine.kv.eviction import EvictionOrder


class KVUsage(NamedTuple):
    """Use of KV memory in tokens. Each token counts once for each layer group that has room for it."""

    held: int  # room in blocks that requests or pins hold
    empty: int  # part of `held` without KV
    cached: int  # room in blocks that only the prefix cache keeps
    total: int


class BlockPool:
    """Pool of reference-counted blocks 0 .. num_blocks-1.

    Each block is used (ref_count > 0), cached (ref_count 0, in the prefix tree, evictable) or free (without useful
    content). The pool calls `on_evict` with each evicted block. The result names other cached blocks that have become
    useless; the pool frees these too.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], Sequence[int]]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_count = [0] * num_blocks
        self._findable = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionOrder(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return: free and cached blocks."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each. Cached blocks are evicted if there are too few free blocks.

        The caller must check that `num_available` is at least `count`.
        """
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int], *, shared: bool = False) -> None:
        """Add a reference to each block. Set `shared` if the blocks hold a prefix that another request wrote."""
        blocks, ref_count = list(blocks), self._ref_count
        for block in blocks:
            if ref_count[block] == 0:
                self._cached.remove(block)
            ref_count[block] += 1
        if shared:
            self._cached.mark_shared(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block, in the given order.

        Release the end of a sequence first, so that it is evicted before the beginning.
        """
        for block in blocks:
            self._ref_count[block] -= 1
            if self._ref_count[block]:
                continue
            if not self._findable[block]:
                self._free.append(block)
                continue
            self._cached.add(block)

    def touch(self, blocks: Iterable[int]) -> None:
        """Make cached blocks the most recently used, and ignore other blocks."""
        for block in blocks:
            if self._ref_count[block] == 0:
                self._cached.touch(block)

    def is_private(self, block: int) -> bool:
        """Return True for a cached block that only the request that wrote it has used."""
        return not self._ref_count[block] and not self._cached.is_shared(block)

    def set_findable(self, blocks: Iterable[int]) -> None:
        """Mark blocks as findable (see KVManager)."""
        for block in blocks:
            self._findable[block] = 1

    def drop_cached(self) -> None:
        while self._cached:
            self._free.append(self._evict())

    def evict(self, block: int) -> None:
        """Free a cached block that is not worth keeping."""
        self._cached.discard(block)
        self._forget(block)
        self._free.append(block)

    def count_cached(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are cached now."""
        ref_count = self._ref_count
        return sum([ref_count[block] == 0 for block in blocks])

    def _evict(self) -> int:
        block = self._cached.pop()
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        self._findable[block] = 0
        for other in self._on_evict(block):
            self._cached.discard(other)
            self._findable[other] = 0
            self._free.append(other)

    def check_integrity(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless every block is in one state and has `held[block]` (default: 0) references."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, count in enumerate(self._ref_count):
            assert count == held.get(block, 0), f"block {block}: ref_count {count}, held {held.get(block, 0)} times"
            cached = block in self._cached
            assert (block in free) + cached == (count == 0), f"block {block}: lost or in two places"
            assert not cached or self._findable[block], f"block {block}: cached but not findable"
            useful = self._findable[block] or self._cached.is_shared(block)
            assert block not in free or not useful, f"block {block}: free but findable, or shared"
        assert self.num_used == sum(count > 0 for count in self._ref_count), "a block is counted twice"
