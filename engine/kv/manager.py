"""Block tables: gives requests the blocks they need, shares the ones they have in common, takes them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.prefix import PrefixNode, PrefixTree
from llmsched.engine.request import Request


class BlockTable:
    """The blocks of one sequence, in order. The first `num_findable` are findable, the last of them as `node`."""

    __slots__ = ("_ids", "_size", "node", "num_findable")

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        self._ids = np.empty(max(16, len(blocks)), dtype=np.int32)
        self._size = 0
        self.node: PrefixNode | None = None
        self.num_findable = 0
        self.extend(blocks)

    def __len__(self) -> int:
        return self._size

    def extend(self, blocks: Sequence[int]) -> None:
        end = self._size + len(blocks)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(end, dtype=np.int32)])
        self._ids[self._size : end] = blocks
        self._size = end

    def replace(self, index: int, block: int) -> None:
        self._ids[index] = block

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """int32 [len(self)], a view."""
        return self._ids[: self._size]


class PrefixHit(NamedTuple):
    """A known prefix: its nodes, and how many of their blocks are evictable now (so taking them uses up memory)."""

    nodes: list[PrefixNode]
    num_evictable: int


NO_HIT = PrefixHit([], 0)


class KVManager:
    """All KV memory of the engine.

    A request's blocks cover whole blocks of its tokens from the beginning; only blocks whose KV has been written can be
    found by others, and a found block is never written again: at least the last token of a request is always computed,
    into a block of its own.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefixes = PrefixTree(block_size)
        self.pool = BlockPool(num_blocks, self.prefixes.remove)
        self._held: list[list[int]] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix of whole blocks that leaves at least the last token to compute.

        Requests that want the log-probabilities of their prompt have to compute all of it.
        """
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return NO_HIT
        max_blocks = (request.num_tokens - 1) // self.block_size
        nodes = self.prefixes.match(request.token_ids, request.cache_salt, max_blocks)
        return PrefixHit(nodes, self.pool.count_cached(node.block for node in nodes))

    def num_missing(self, request: Request, hit: PrefixHit) -> int:
        """Available blocks that admitting the request with all its tokens would take."""
        return self.num_blocks_for(request.num_tokens) - len(hit.nodes) + hit.num_evictable

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Give the request blocks for all its tokens; those of the hit count as computed."""
        blocks = [node.block for node in hit.nodes]
        self.pool.acquire(blocks)
        table = BlockTable(blocks)
        if blocks:
            table.node, table.num_findable = hit.nodes[-1], len(blocks)
        request.block_table = table
        request.num_computed_tokens = len(blocks) * self.block_size
        self.grow(request)

    def num_growing(self, request: Request) -> int:
        """Blocks still missing for the request's tokens."""
        return self.num_blocks_for(request.num_tokens) - len(table_of(request))

    def grow(self, request: Request) -> None:
        """Add the blocks that the request's tokens need; the caller has checked that they are available."""
        if (missing := self.num_growing(request)) > 0:
            table_of(request).extend(self.pool.allocate(missing))

    def commit(self, request: Request) -> None:
        """Make the request's newly written whole blocks findable.

        Where another request has written the same prefix first, its block takes the place of ours.
        """
        if not self.enable_prefix_caching:
            return
        table = table_of(request)
        for index in range(table.num_findable, request.num_computed_tokens // self.block_size):
            block = int(table.ids[index])
            table.node = self.prefixes.insert(table.node, request.token_ids, index, request.cache_salt, block)
            table.num_findable += 1
            if table.node.block == block:
                self.pool.set_findable(block)
            else:
                self.pool.acquire([table.node.block])
                self.pool.release([block])
                table.replace(index, table.node.block)

    def release(self, request: Request) -> None:
        """Take back all blocks of a request that has ended or is preempted; what was written stays findable."""
        self.pool.release(reversed(table_of(request).ids.tolist()))
        request.block_table = None
        request.num_computed_tokens = 0

    def hold(self, table: BlockTable) -> None:
        """Keep the blocks of a request that ends from being used by others until `release_held`."""
        blocks = table.ids.tolist()
        self.pool.acquire(blocks)
        self._held.append(blocks)

    def release_held(self) -> None:
        """Give back what `hold` kept."""
        for blocks in self._held:
            self.pool.release(reversed(blocks))
        self._held.clear()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that no running request holds."""
        self.pool.drop_cached()

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every block is accounted for by the given requests and the prefix tree."""
        held: Counter[int] = Counter(block for blocks in self._held for block in blocks)
        for request in holders:
            held.update(table_of(request).ids.tolist())
        self.pool.check_integrity(held)


def table_of(request: Request) -> BlockTable:
    """The block table of an admitted request."""
    assert request.block_table is not None, f"request {request.request_id} has no blocks"
    return request.block_table
