"""Block table of one sequence: a row of block ids for each group of layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.prefix_tree import PrefixNode

NEVER = sys.maxsize


class BlockTable:
    """Block ids of one sequence, as int32 array `ids` [groups, len(table)].

    Rows of full-attention groups come first and have a block at every index. Rows of sliding-window groups have blocks
    at indices `window_start` to `window_end` - 1; their other entries are meaningless.
    """

    __slots__ = (
        "_ids",
        "_width",
        "capacity",
        "commit_at",
        "ids",
        "is_findable",
        "layout",
        "node",
        "num_findable",
        "num_initial",
        "window_end",
        "window_start",
    )

    def __init__(self, layout: KVLayout, nodes: Sequence[PrefixNode], num_initial: int, *, findable: bool) -> None:
        self.layout = layout
        self._ids = np.zeros((layout.num_groups, max(16, len(nodes))), dtype=np.int32)
        self._set_width(len(nodes))
        self.capacity = len(nodes) * layout.block_size  # number of tokens up to which no new block is needed
        self.window_start = self.window_end = 0
        self.is_findable = findable
        self.node = nodes[-1] if nodes else None  # of the last findable block
        self.num_findable = len(nodes)  # leading blocks in the prefix tree
        self.num_initial = num_initial  # num_computed_tokens at admission
        #: KVManager.commit does nothing up to this num_computed_tokens.
        self.commit_at = (len(nodes) + 1) * layout.block_size if findable or layout.window_groups else NEVER
        if nodes:
            self._ids[: layout.full_groups, : len(nodes)] = np.transpose([node.blocks for node in nodes])

    def __len__(self) -> int:
        return self._width

    @property
    def num_blocks(self) -> int:
        """Number of blocks held in all groups together."""
        layout = self.layout
        return layout.full_groups * self._width + layout.window_groups * (self.window_end - self.window_start)

    # -- growing and shrinking --------------------------------------------------------------------------------

    def num_growing(self, num_tokens: int) -> int:
        """Return how many more blocks the sequence needs to hold `num_tokens` tokens."""
        layout = self.layout
        width = layout.width(num_tokens)
        growing = layout.full_groups * max(0, width - self._width)
        if layout.window_groups:
            growing += layout.window_groups * max(0, self.needed_window_end(width) - self.window_end)
        return growing

    def needed_window_end(self, width: int) -> int:
        """Return the `window_end` needed for a sequence whose tokens fill `width` blocks per group."""
        return min(width, self.window_start + self.layout.num_behind + 1)

    def extend(self, end: int, blocks: Sequence[int]) -> None:
        """Extend full-attention rows to length `end`.

        `blocks` has the new blocks of the first row, then those of the second row, and so on.
        """
        full = self.layout.full_groups
        if end > self._ids.shape[1]:
            self._ids = np.concatenate([self._ids, np.zeros((len(self._ids), end), dtype=np.int32)], axis=1)
        self._ids[:full, self._width : end] = blocks if full == 1 else np.reshape(blocks, (full, end - self._width))
        self._set_width(end)
        self._set_capacity()

    def shrink(self, end: int) -> list[int]:
        """Remove the blocks at indices `end` and above from full-attention rows. Return them, the last one first."""
        blocks = self.full_blocks(end, self._width)
        self._set_width(end)
        self._set_capacity()
        return blocks[::-1]

    def open_window(self, start: int, nodes: Sequence[PrefixNode]) -> None:
        """Let sliding-window rows begin at index `start`, with the sliding-window blocks of `nodes`."""
        self.window_start = start
        self.window_end = start + len(nodes)
        if nodes:
            held = [node.window_blocks for node in nodes]
            self._ids[self.layout.full_groups :, start : self.window_end] = np.transpose(held)
        self._set_capacity()

    def extend_window(self, blocks: Sequence[int]) -> None:
        """Extend all sliding-window rows by the same number of blocks.

        `blocks` has the new blocks of the first row, then those of the second row, and so on.
        """
        end = self.window_end + len(blocks) // self.layout.window_groups
        self._ids[self.layout.full_groups :, self.window_end : end] = np.reshape(
            blocks, (self.layout.window_groups, -1)
        )
        self.window_end = end
        self._set_capacity()

    def shrink_window(self, start: int) -> list[int]:
        """Remove the blocks before index `start` from sliding-window rows and return them, the last one first."""
        blocks = self.window_blocks(self.window_start, start)
        self._ids[self.layout.full_groups :, self.window_start : start] = 0
        self.window_start = start
        return blocks[::-1]

    def trim_window(self, end: int) -> list[int]:
        """Remove the blocks from index `end` on from sliding-window rows and return them, the last one first."""
        blocks = self.window_blocks(end, self.window_end)
        self._ids[self.layout.full_groups :, end : self.window_end] = 0
        self.window_end = end
        self._set_capacity()
        return blocks[::-1]

    def _set_width(self, width: int) -> None:
        self._width = width
        self.ids: npt.NDArray[np.int32] = self._ids[:, :width]

    def _set_capacity(self) -> None:
        end = min(self._width, self.window_end) if self.layout.window_groups else self._width
        self.capacity = end * self.layout.block_size

    # -- blocks held ------------------------------------------------------------------------------------------

    def column(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the blocks at `index` as two tuples: full-attention groups, then sliding-window groups."""
        column, full = tuple(self._ids[:, index].tolist()), self.layout.full_groups
        return column[:full], column[full:]

    def replace(self, index: int, group: int, blocks: Sequence[int]) -> None:
        """Put `blocks` at `index` into the rows of consecutive groups, the first of which is `group`."""
        self._ids[group : group + len(blocks), index] = blocks

    def full_blocks(self, start: int, end: int) -> list[int]:
        """Return the blocks of all full-attention groups at positions `start` to `end` - 1 in the table.

        They are sorted by position, then by group.
        """
        return self._ids[: self.layout.full_groups, start:end].T.ravel().tolist()

    def window_blocks(self, start: int, end: int) -> list[int]:
        """Return the blocks of all sliding-window groups at positions `start` to `end` - 1 in the table.

        They are sorted by position, then by group.
        """
        return self._ids[self.layout.full_groups :, start:end].T.ravel().tolist()

    def blocks_with_kv(self, first: int, num_computed_tokens: int) -> list[int]:
        """Return the blocks that hold computed KV: full-attention blocks from index `first` on, then window blocks."""
        end = self.layout.width(num_computed_tokens)
        blocks = self.full_blocks(first, end)
        if self.layout.window_groups:
            blocks += self.window_blocks(self.window_start, end)
        return blocks

    def held_blocks(self) -> list[int]:
        """Return all blocks held, in the order to release them: the end of the sequence first."""
        blocks = self.full_blocks(0, self._width)
        if self.layout.window_groups:
            blocks += self.window_blocks(self.window_start, self.window_end)
        return blocks[::-1]

    def num_empty(self, num_computed_tokens: int) -> int:
        """Return the number of tokens that the held blocks can still take, summed over groups."""
        layout, size = self.layout, self.layout.block_size
        full = layout.full_groups * (self._width * size - num_computed_tokens)
        return full + layout.window_groups * (self.window_end * size - num_computed_tokens)


class SwappedKV(NamedTuple):
    """Copy in host memory of the KV of a preempted request's first `num_tokens` tokens."""

    first: int  # earlier blocks are not copied, because other requests or pins hold them too
    num_tokens: int
    full_blocks: list[int]  # host blocks of full-attention groups from `first` on, sorted by index, then by group
    window_start: int = 0
    #: Host blocks of sliding-window groups from `window_start` on.
    window_blocks: list[int] = []  # noqa: RUF012 (never changed)
    host_state: int | None = None  # place of the recurrent state

    @property
    def host_states(self) -> list[int]:
        return [] if self.host_state is None else [self.host_state]

    @property
    def host_blocks(self) -> list[int]:
        return self.full_blocks + self.window_blocks
