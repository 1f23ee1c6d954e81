"""The block tables of one sequence: one for each group of layers."""

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
    """The blocks of one sequence, in order, a row for each group. The first `num_findable` are findable, the last of
    them as `node`.

    Rows of groups that keep all tokens come first and are `len(table)` long. Rows of groups with a window are held from
    `window_start` to before `window_end`; what is written elsewhere in them means nothing.

    In a step in which a sequence crosses no block boundary two comparisons tell that nothing is to be done: it needs no
    block while num_tokens <= `capacity` (the tokens that all rows have room for), and has nothing to commit or to give
    back while num_computed_tokens < `commit_at`. `ids` are int32 [groups, len(table)]. `num_initial` are the tokens
    that were computed when it was admitted.
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
        self.capacity = len(nodes) * layout.block_size
        self.window_start = self.window_end = 0
        self.is_findable = findable
        self.node = nodes[-1] if nodes else None
        self.num_findable = len(nodes)
        self.num_initial = num_initial
        self.commit_at = (len(nodes) + 1) * layout.block_size if findable or layout.window_groups else NEVER
        if nodes:
            self._ids[: layout.full_groups, : len(nodes)] = np.transpose([node.blocks for node in nodes])

    def __len__(self) -> int:
        return self._width

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, in all groups."""
        layout = self.layout
        return layout.full_groups * self._width + layout.window_groups * (self.window_end - self.window_start)

    # -- growing and shrinking --------------------------------------------------------------------------------

    def extend(self, end: int, blocks: Sequence[int]) -> None:
        """Make the table `end` long, with more blocks for each group that keeps all tokens."""
        full = self.layout.full_groups
        if end > self._ids.shape[1]:
            self._ids = np.concatenate([self._ids, np.zeros((len(self._ids), end), dtype=np.int32)], axis=1)
        self._ids[:full, self._width : end] = blocks if full == 1 else np.reshape(blocks, (full, end - self._width))
        self._set_width(end)
        self._set_capacity()

    def open_window(self, start: int, nodes: Sequence[PrefixNode]) -> None:
        """Let the groups with a window begin at block `start`, with what the nodes hold of the first blocks."""
        self.window_start = start
        self.window_end = start + len(nodes)
        if nodes:
            held = [node.window_blocks for node in nodes]
            self._ids[self.layout.full_groups :, start : self.window_end] = np.transpose(held)
        self._set_capacity()

    def extend_window(self, blocks: Sequence[int]) -> None:
        """Add blocks to the groups with a window, the same number to each."""
        end = self.window_end + len(blocks) // self.layout.window_groups
        self._ids[self.layout.full_groups :, self.window_end : end] = np.reshape(
            blocks, (self.layout.window_groups, -1)
        )
        self.window_end = end
        self._set_capacity()

    def shrink_window(self, start: int) -> list[int]:
        """Let go of the blocks before `start` in groups with a window; returns them, the last first."""
        blocks = self.window_blocks(self.window_start, start)
        self._ids[self.layout.full_groups :, self.window_start : start] = 0
        self.window_start = start
        return blocks[::-1]

    def _set_width(self, width: int) -> None:
        self._width = width
        self.ids: npt.NDArray[np.int32] = self._ids[:, :width]

    def _set_capacity(self) -> None:
        end = min(self._width, self.window_end) if self.layout.window_groups else self._width
        self.capacity = end * self.layout.block_size

    # -- what is held -----------------------------------------------------------------------------------------

    def column(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The block `index` of each group that keeps all tokens, and of each group with a window."""
        column, full = tuple(self._ids[:, index].tolist()), self.layout.full_groups
        return column[:full], column[full:]

    def replace(self, index: int, group: int, blocks: Sequence[int]) -> None:
        """Put other blocks at `index`, one for each group from `group` on."""
        self._ids[group : group + len(blocks), index] = blocks

    def full_blocks(self, start: int, end: int) -> list[int]:
        """Blocks `start` to before `end` of the groups that keep all tokens, those of an index side by side."""
        return self._ids[: self.layout.full_groups, start:end].T.ravel().tolist()

    def window_blocks(self, start: int, end: int) -> list[int]:
        """Blocks `start` to before `end` of the groups with a window, those of an index side by side."""
        return self._ids[self.layout.full_groups :, start:end].T.ravel().tolist()

    def held_blocks(self) -> list[int]:
        """All blocks that are held, in the order in which they are given back: the end of the sequence first."""
        blocks = self.full_blocks(0, self._width)
        if self.layout.window_groups:
            blocks += self.window_blocks(self.window_start, self.window_end)
        return blocks[::-1]

    def num_empty(self, num_computed_tokens: int) -> int:
        """Tokens that the blocks of the groups have room for, and no KV of."""
        layout, size = self.layout, self.layout.block_size
        full = layout.full_groups * (self._width * size - num_computed_tokens)
        return full + layout.window_groups * (self.window_end * size - num_computed_tokens)

    def advance(self, node: PrefixNode) -> None:
        """The next block is findable, as `node`."""
        self.node = node
        self.num_findable += 1


class Swapped(NamedTuple):
    """What host memory holds of a preempted request: the KV of its tokens up to `num_tokens`.

    slots[i] has the i-th block of those from index `first` on, of groups that keep all tokens. The blocks in front were
    held by others too, and are left to the prefix cache. `window_slots` have those of groups with a window, from index
    `window_start` on.
    """

    first: int
    num_tokens: int
    slots: list[int]
    window_start: int = 0
    window_slots: list[int] = []  # noqa: RUF012 (never changed)

    @property
    def all_slots(self) -> list[int]:
        return self.slots + self.window_slots
