"""The block table of one sequence."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmsched.engine.kv.prefix import PrefixNode
from llmsched.engine.request import Request

NEVER = sys.maxsize


class BlockTable:
    """The blocks of one sequence, in order. The first `num_findable` are findable, the last of them as `node`.

    In a step in which a sequence crosses no block boundary two comparisons tell that nothing is to be done:
    it needs no block while num_tokens <= `capacity`, and has nothing to commit while num_computed_tokens < `commit_at`.
    `num_initial` are the tokens that were computed when it was admitted.
    """

    __slots__ = ("_ids", "_size", "block_size", "capacity", "commit_at", "node", "num_findable", "num_initial")

    def __init__(self, block_size: int, nodes: Sequence[PrefixNode], num_initial: int, *, findable: bool) -> None:
        self._ids = np.empty(max(16, len(nodes)), dtype=np.int32)
        self._size = 0
        self.block_size = block_size
        self.capacity = 0
        self.node = nodes[-1] if nodes else None
        self.num_findable = len(nodes)
        self.num_initial = num_initial
        self.commit_at = (len(nodes) + 1) * block_size if findable else NEVER
        self.extend([node.block for node in nodes])

    def __len__(self) -> int:
        return self._size

    def extend(self, blocks: Sequence[int]) -> None:
        end = self._size + len(blocks)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(end, dtype=np.int32)])
        self._ids[self._size : end] = blocks
        self._size = end
        self.capacity = end * self.block_size

    def replace(self, index: int, block: int) -> None:
        self._ids[index] = block

    def advance(self, node: PrefixNode) -> None:
        """The next block is findable, as `node`."""
        self.node = node
        self.num_findable += 1
        self.commit_at += self.block_size

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """int32 [len(self)], a view."""
        return self._ids[: self._size]


def table_of(request: Request) -> BlockTable:
    """The block table of an admitted request."""
    assert request.block_table is not None, f"request {request.request_id} has no blocks"
    return request.block_table
