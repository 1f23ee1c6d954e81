"""Blocks that are kept for the dead: members of a static batch that have ended before it."""

from __future__ import annotations

from collections import Counter

from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.use import num_empty
from llmsched.engine.request import Request


class Held:
    """Keeps the blocks of requests that end from being used by others until all are released.

    `num_empty` are the tokens that they have room for and no KV of.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: list[list[int]] = []
        self.num_empty = 0

    def add(self, request: Request) -> None:
        """Keep the blocks of a request that is about to end."""
        blocks = request.table.held_blocks()
        self._pool.acquire(blocks)
        self._blocks.append(blocks)
        self.num_empty += num_empty(request)

    def release(self) -> None:
        """Give everything back."""
        for blocks in self._blocks:
            self._pool.release(blocks)
        self._blocks.clear()
        self.num_empty = 0

    def holds(self) -> Counter[int]:
        """References to each block."""
        return Counter(block for blocks in self._blocks for block in blocks)
