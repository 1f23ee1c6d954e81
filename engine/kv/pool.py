"""Pool of fixed-size KV blocks: reference counts, free and cached blocks, eviction order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

#: Largest share of the pool for cached shared blocks, which are evicted last. With 0.25 the Mooncake traces had more
#: hits than with plain LRU at every pool size tried. Without a limit, unused prefixes displace conversation histories
#: (as few as two thirds of LRU's hits).
MAX_SHARED = 0.25


class KVUsage(NamedTuple):
    """Use of KV memory, as token capacities of blocks; a token in two layer groups counts twice.

    `held` is the capacity of blocks that requests or pins hold (shared blocks count once), and `empty` the unused part
    of it. `cached` is the capacity of blocks that only the prefix cache keeps, `total` that of all blocks.
    """

    held: int
    empty: int
    cached: int
    total: int


class BlockPool:
    """Pool of reference-counted blocks 0 .. num_blocks-1.

    Each block is in exactly one of three states, so `num_free + num_cached + num_used == num_blocks` always:

    - used: ref_count > 0;
    - cached: ref_count 0, in the prefix tree, evictable;
    - free: ref_count 0, without useful content.

    Private cached blocks (used only by the request that wrote them) are evicted before shared blocks, and within each
    kind the least recently released block first. When shared blocks exceed MAX_SHARED of the pool, the least recently
    used shared block becomes the newest private block (segmented LRU, Karedla et al. 1994).

    Requests must release their last blocks first: then the end of a sequence is evicted before its beginning. (Blocks
    that have left a sliding window may be evicted at any time.)

    `on_evict` is called with each evicted block. It returns other cached blocks that have become useless, and the pool
    frees these too.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], Sequence[int]]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._ref_count = [0] * num_blocks
        self._findable = bytearray(num_blocks)
        self._is_shared = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._private: OrderedDict[int, None] = OrderedDict()
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._max_shared = int(MAX_SHARED * num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._private) + len(self._shared)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return: free and cached blocks."""
        return len(self._free) + len(self._private) + len(self._shared)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, free ones first, then evicted ones.

        The caller must check that `num_available` is at least `count`.
        """
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int], *, shared: bool = False) -> None:
        """Add a reference to each block. Set `shared` if a request uses blocks that another request wrote.

        With `shared`, the blocks must be a whole prefix: no earlier block may be missing.
        """
        ref_count, is_shared = self._ref_count, self._is_shared
        for block in blocks:
            if ref_count[block] == 0:
                del self._rank_of(block)[block]
            ref_count[block] += 1
            if shared:
                is_shared[block] = 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block, in the given order (end of the sequence first)."""
        for block in blocks:
            self._ref_count[block] -= 1
            if self._ref_count[block]:
                continue
            if not self._findable[block]:
                self._free.append(block)
                continue
            self._rank_of(block)[block] = None
            if len(self._shared) > self._max_shared:
                demoted, _ = self._shared.popitem(last=False)
                self._is_shared[demoted] = 0
                self._private[demoted] = None

    def touch(self, blocks: Iterable[int]) -> None:
        """Make cached blocks the most recently used. References to all earlier blocks of the prefix must be held."""
        for block in blocks:
            if self._ref_count[block] == 0:
                self._rank_of(block).move_to_end(block)

    def set_findable(self, blocks: Iterable[int]) -> None:
        """Mark blocks as findable, that is, as blocks of a node in the prefix tree."""
        for block in blocks:
            self._findable[block] = 1

    def drop_cached(self) -> None:
        """Evict every cached block."""
        while self._private or self._shared:
            self._free.append(self._evict())

    def count_cached(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are cached now; acquiring these lowers `num_available`."""
        ref_count = self._ref_count
        return sum([ref_count[block] == 0 for block in blocks])

    def _rank_of(self, block: int) -> OrderedDict[int, None]:
        return self._shared if self._is_shared[block] else self._private

    def _evict(self) -> int:
        block, _ = (self._private or self._shared).popitem(last=False)
        self._findable[block] = self._is_shared[block] = 0
        for other in self._on_evict(block):
            del self._rank_of(other)[other]
            self._findable[other] = self._is_shared[other] = 0
            self._free.append(other)
        return block

    def check_integrity(self, held: dict[int, int]) -> None:
        """Raise AssertionError unless every block is in one state and has `held[block]` references."""
        free, private, shared = set(self._free), set(self._private), set(self._shared)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free | private | shared) == self.num_available, "a block is in two places"
        for block, count in enumerate(self._ref_count):
            assert count == held.get(block, 0), f"block {block}: ref_count {count}, held {held.get(block, 0)} times"
            cached = block in (shared if self._is_shared[block] else private)
            assert (count == 0) == (block in free or cached), f"block {block}: lost or in two places"
            assert not cached or self._findable[block], f"block {block}: cached but not findable"
            worthless = not (self._findable[block] or self._is_shared[block])
            assert block not in free or worthless, f"block {block}: free but findable, or shared"
