"""Blocks that are to be copied to others: parts of a block that a request begins like."""

from __future__ import annotations

from collections.abc import Sequence

from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.kv.table import BlockTable


class Copies:
    """The copies that the next step makes before anything else, noted since the last was handed out.

    Why that is safe: only blocks written in earlier steps are sources, so a source holds what it is copied for when the
    copy is noted. From then on it may be evicted and given to another, but nothing is written to it before the step,
    and copies come first in it. It may become the destination of a later copy, but was none of an earlier one, and a
    destination occurs once, as that of its last owner: so in order, or with all sources read first, each block gets
    what was meant.
    """

    def __init__(self, swap: SwapSpace) -> None:
        self._swap = swap
        self._source_of: dict[int, int] = {}

    def note(self, sources: Sequence[int], table: BlockTable, index: int) -> None:
        """Copy a block of each group to block `index` of the table."""
        full, window = table.column(index)
        blocks = [*full, *window]
        for group, source in enumerate(sources):
            if source in blocks:  # it was evicted just now, to become a destination: it is its own then
                other = blocks.index(source)
                blocks[group], blocks[other] = source, blocks[group]
        table.replace(index, 0, blocks)
        for source, destination in zip(sources, blocks, strict=True):
            if source != destination:
                self._source_of[destination] = source
                self._swap.overwrite(destination)

    def pending(self) -> list[tuple[int, int]]:
        """(source, destination) blocks, in the order in which they were noted."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def take(self) -> list[tuple[int, int]]:
        """The pending copies, which are pending no more."""
        copies = self.pending()
        self._source_of.clear()
        return copies
