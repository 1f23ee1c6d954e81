"""Host memory for the KV of preempted requests: slots of one block each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.table import BlockTable
from llmsched.engine.request import Request
from llmsched.engine.units import human_bytes


def plan_swap(swap_space: int, block_bytes: int, free_bytes: int) -> SwapSpace:
    """The slots that `swap_space` bytes hold; `free_bytes` of host memory are free for them.

    Raises ConfigError when that is not one block, or more than is free.
    """
    if 0 < swap_space < block_bytes:
        raise ConfigError(
            "swap_space", f"{human_bytes(swap_space)} is less than a KV block ({human_bytes(block_bytes)}); set more"
        )
    if swap_space > max(0, free_bytes):
        raise ConfigError(
            "swap_space",
            f"{human_bytes(swap_space)} is more host memory than is free beside everything else, "
            f"{human_bytes(max(0, free_bytes))}; set less",
        )
    return SwapSpace(swap_space // block_bytes, block_bytes)


class SwapSpace:
    """Slots 0 .. num_slots-1 of `block_bytes` bytes each, and the copies from and to them that the next step makes.

    A slot is free, held by one preempted request (`Request.swapped`), or about to be copied back, and free once the
    next step has been handed out (`take`): until then nothing else may be copied to it.
    """

    def __init__(self, num_slots: int = 0, block_bytes: int = 0) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._free: list[int] = []
        self._num_begun = 0  # slots that were ever used; those from here on are free as well
        self._returning: list[int] = []
        self._outs: dict[int, int] = {}
        self._ins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_slots - self._num_begun

    def save(self, blocks: Sequence[int]) -> list[int]:
        """Copy the blocks to slots in the next step; returns these. The caller has checked `num_free`.

        The blocks may change hands at once: slots are filled before anything else happens in a step.
        """
        slots = [self._take_free() for _ in blocks]
        self._outs.update(zip(slots, blocks, strict=True))
        return slots

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_begun += 1
        return self._num_begun - 1

    def restore(self, request: Request, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy some of the request's slots back to `blocks` in the next step; all its slots come free."""
        assert request.swapped is not None
        self._ins.update(zip(blocks, slots, strict=True))
        self._returning += request.swapped.all_slots
        request.swapped = None

    def overwrite(self, block: int) -> None:
        """Something else is copied to the block in the next step than what `restore` may have meant for it before."""
        self._ins.pop(block, None)

    def discard(self, request: Request) -> None:
        """Give up what was saved of the request, if anything was."""
        if request.swapped is None:
            return
        for slot in request.swapped.all_slots:
            self._outs.pop(slot, None)
        self._free += reversed(request.swapped.all_slots)
        request.swapped = None

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The next step's copies, noted since the last call: (block, slot) pairs out, (slot, block) pairs in."""
        outs = [(block, slot) for slot, block in self._outs.items()]
        ins = [(slot, block) for block, slot in self._ins.items()]
        self._free += reversed(self._returning)
        self._outs, self._ins, self._returning = {}, {}, []
        return outs, ins

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every slot is free, about to be, or held by one of the given requests."""
        held = [slot for request in holders if request.swapped is not None for slot in request.swapped.all_slots]
        everywhere = sorted(held + self._free + self._returning)
        assert everywhere == list(range(self._num_begun)), "a slot is lost or in two places"


class BlockCopies:
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
