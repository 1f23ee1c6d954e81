"""KV copies at the start of a step: to and from host memory for preempted requests, and between blocks.

The next step makes them in this order: host copies out, block copies, host copies in, then everything else. A block may
be saved, then be source or destination of a block copy, then be restored to, all before the step writes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.table import BlockTable, SwappedKV
from llmsched.engine.request import Request
from llmsched.engine.units import human_bytes


def plan_swap(swap_space: int, block_bytes: int, free_bytes: int) -> SwapSpace:
    """Return the host memory for swapped KV: `swap_space` of `free_bytes` bytes that are free.

    Raises ConfigError if that is less than one block, or more than is free.
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
    """Host blocks 0 .. num_blocks-1 of `block_bytes` bytes each, and the copies of the next step to and from them.

    A host block is free, held by one preempted request (`Request.swapped`), or waiting to be copied back. The last kind
    becomes free when the next step's copies are handed out (`take`); until then it must not be overwritten.
    """

    def __init__(self, num_blocks: int = 0, block_bytes: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._free: list[int] = []
        self._num_begun = 0  # host blocks that were ever used; those from here on are free as well
        self._returning: list[int] = []
        self._outs: dict[int, int] = {}
        self._ins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_begun

    def save(self, request: Request, first: int) -> None:
        """Copy the request's KV to host memory in the next step, of full-attention groups from block index `first` on.

        The caller has checked `num_free`, and may release the blocks at once: these copies come first in a step.
        """
        table, num_tokens = request.table, request.num_computed_tokens
        blocks = table.blocks_with_kv(first, num_tokens)
        hosts = [self._free.pop() for _ in range(min(len(blocks), len(self._free)))]
        begun, self._num_begun = self._num_begun, self._num_begun + len(blocks) - len(hosts)
        hosts += range(begun, self._num_begun)
        self._outs.update(zip(hosts, blocks, strict=True))
        num_full = table.layout.full_groups * (table.layout.width(num_tokens) - first)
        request.swapped = SwappedKV(first, num_tokens, hosts[:num_full], table.window_start, hosts[num_full:])

    def restore(self, request: Request, first: int) -> int:
        """Copy the request's KV back in the next step, of full-attention groups from block index `first` on.

        Returns how many blocks are copied.
        """
        table, swapped = request.table, request.swapped
        assert swapped is not None
        hosts = swapped.full_blocks[table.layout.full_groups * (first - swapped.first) :] + swapped.window_blocks
        self._ins.update(zip(table.blocks_with_kv(first, swapped.num_tokens), hosts, strict=True))
        self._returning += swapped.host_blocks
        request.swapped = None
        return len(hosts)

    def overwrite(self, block: int) -> None:
        """Drop a copy to `block` that `restore` noted: the next step copies something else there."""
        self._ins.pop(block, None)

    def discard(self, request: Request) -> None:
        """Free the host blocks of the request, if it has any."""
        if request.swapped is None:
            return
        for host in request.swapped.host_blocks:
            self._outs.pop(host, None)
        self._free += reversed(request.swapped.host_blocks)
        request.swapped = None

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies noted since the last call: (block, host block) pairs out, (host block, block) pairs in."""
        outs = [(block, host) for host, block in self._outs.items()]
        ins = [(host, block) for block, host in self._ins.items()]
        self._free += reversed(self._returning)
        self._outs, self._ins, self._returning = {}, {}, []
        return outs, ins

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless each host block is free, about to be, or held by one of the given requests."""
        held = [host for request in holders if request.swapped is not None for host in request.swapped.host_blocks]
        everywhere = sorted(held + self._free + self._returning)
        assert everywhere == list(range(self._num_begun)), "a host block is lost or in two places"


class BlockCopies:
    """Copies from block to block in the next step: parts of known blocks that requests begin like (copy on write).

    Sources were written in earlier steps, and each destination occurs once, for its last owner. A source may become the
    destination of a later copy, never of an earlier one, so make them in order or read all sources first.
    """

    def __init__(self, swap: SwapSpace) -> None:
        self._swap = swap
        self._source_of: dict[int, int] = {}

    def note(self, sources: Sequence[int], table: BlockTable, index: int) -> None:
        """Copy `sources`, a block of each group, to the blocks at `index` of the table."""
        full, window = table.column(index)
        blocks = [*full, *window]
        for group, source in enumerate(sources):
            if source in blocks:  # evicted just now and allocated as a destination: use it in place
                other = blocks.index(source)
                blocks[group], blocks[other] = source, blocks[group]
        table.replace(index, 0, blocks)
        for source, destination in zip(sources, blocks, strict=True):
            if source != destination:
                self._source_of[destination] = source
                self._swap.overwrite(destination)

    def pending(self) -> list[tuple[int, int]]:
        """Return the (source, destination) blocks noted since the last `take`, in order."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def take(self) -> list[tuple[int, int]]:
        """Return the pending copies and forget them."""
        copies = self.pending()
        self._source_of.clear()
        return copies
