"""Blocks of requests: how block tables grow and shrink, and the blocks that a static batch keeps."""

from __future__ import annotations

from collections import Counter

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.request import Request


class RequestBlocks:
    """Blocks of running requests: grows and shrinks their block tables with blocks from a pool."""

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self._layout = layout
        self._pool = pool

    def grow(self, request: Request) -> None:
        """Add the blocks that the request's tokens need. The caller must check that enough blocks are available."""
        table = request.table
        if request.num_tokens <= table.capacity:
            return
        width = self._layout.width(request.num_tokens)
        if width > len(table):
            table.extend(width, self._pool.allocate(self._layout.full_groups * (width - len(table))))
        if self._layout.window_groups:
            # The last token is computed next, even if `commit` has not released the blocks behind the window yet.
            is_last = request.num_tokens - request.num_computed_tokens == 1
            end = width if is_last else table.needed_window_end(width)
            if end > table.window_end:
                table.extend_window(self._pool.allocate(self._layout.window_groups * (end - table.window_end)))

    def reach(self, request: Request, end: int) -> int:
        """Allocate the sliding-window blocks that this step needs to compute a request's tokens before `end`.

        Returns the position up to which the blocks suffice: `end`, or less if sliding-window groups lack blocks.
        """
        table = request.table
        if end > table.capacity:
            wanted = self._layout.width(end) - table.window_end
            count = min(wanted, self._pool.num_available // self._layout.window_groups)
            table.extend_window(self._pool.allocate(self._layout.window_groups * count))
        return min(end, table.capacity)

    def lend(self, request: Request, end: int) -> int:
        """Allocate blocks, as far as they are available, so that a step can compute draft tokens before position `end`.

        Returns the position up to which the blocks suffice. After the step, call `take_back(...)`.
        """
        table, layout = request.table, self._layout
        if end > table.capacity:
            columns = min(layout.width(end) - len(table), self._pool.num_available // layout.num_groups)
            if columns > 0:
                table.extend(len(table) + columns, self._pool.allocate(layout.full_groups * columns))
            if layout.window_groups:
                return self.reach(request, min(end, len(table) * layout.block_size))
        return min(end, table.capacity)

    def take_back(self, request: Request) -> None:
        """Release the blocks that `lend(...)` allocated, except those that the request's tokens need."""
        width = self._layout.width(request.num_tokens)
        if width < len(request.table):
            self._pool.release(request.table.shrink(width))
        self.trim(request)

    def trim(self, request: Request) -> None:
        """Release the blocks that `reach(...)` allocated to the request for a step that was not computed."""
        table = request.table
        if self._layout.window_groups:
            end = table.needed_window_end(self._layout.width(request.num_tokens))
            if end < table.window_end:
                self._pool.release(table.trim_window(end))


class StaticBatchBlocks:
    """Blocks of a static batch: each request keeps blocks for max_model_len tokens until the batch ends."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: list[list[int]] = []
        self.num_empty = 0

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Extend the request's blocks in full-attention groups to `num_tokens` tokens, or as far as the pool allows."""
        table = request.table
        layout = table.layout
        spare = self._pool.num_available - layout.window_groups * (layout.num_behind + 1)
        if layout.full_groups:
            width = min(layout.width(num_tokens), len(table) + max(0, spare) // layout.full_groups)
            table.extend(width, self._pool.allocate(layout.full_groups * (width - len(table))))

    def keep(self, request: Request) -> None:
        """Keep the blocks of a request that ends, until its batch ends."""
        blocks = request.table.held_blocks()
        self._pool.acquire(blocks)
        self._blocks.append(blocks)
        self.num_empty += request.table.num_empty(request.num_computed_tokens)

    def release(self) -> None:
        for blocks in self._blocks:
            self._pool.release(blocks)
        self._blocks.clear()
        self.num_empty = 0

    def ref_counts(self) -> Counter[int]:
        return Counter(block for blocks in self._blocks for block in blocks)
