"""Fixed-size KV blocks: who holds them, which can be found again, which are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks-1.

    Each block is in exactly one of three states, so `num_free + num_cached + num_used == num_blocks` always:

    - used: ref_count > 0;
    - cached: ref_count 0, its content can still be found (the prefix tree points at it), evictable;
    - free: ref_count 0, content worthless.

    Cached blocks leave in the order in which they were released. Owners release the end of a sequence before its
    beginning, so a block always leaves before the blocks in front of it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_count = [0] * num_blocks
        self._findable = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and evictable ones."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the longest unused cached ones when no free ones are left.

        The caller has checked `num_available`.
        """
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that were found again."""
        for block in blocks:
            if self._ref_count[block] == 0:
                del self._cached[block]
            self._ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block, in the given order (end of the sequence first)."""
        for block in blocks:
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._retire(block)

    def set_findable(self, block: int) -> None:
        """The prefix tree points at this block from now on."""
        self._findable[block] = 1

    def drop_cached(self) -> None:
        """Evict every cached block."""
        while self._cached:
            self._free.append(self._evict())

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` acquiring would take out of the evictable ones."""
        return sum(self._ref_count[block] == 0 for block in blocks)

    def _retire(self, block: int) -> None:
        if self._findable[block]:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._findable[block] = 0
        self._on_evict(block)
        return block

    def check_integrity(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless every block is where it belongs; `held` maps block to references outside."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        for block, count in enumerate(self._ref_count):
            assert count == held.get(block, 0), f"block {block}: ref_count {count}, held {held.get(block, 0)} times"
            assert (count == 0) == (block in free or block in cached), f"block {block}: lost or in two places"
            assert block not in cached or self._findable[block], f"block {block}: cached but not findable"
            assert block not in free or not self._findable[block], f"block {block}: free but findable"
