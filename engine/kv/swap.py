"""KV copies at the start of a step: to and from host memory for preempted requests, and between blocks.

A step first copies blocks to host memory, then from block to block, then from host memory to blocks. So one step can
save a block to host memory and then write to the same block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmsched.engine.errors import ConfigError
from llmsched.engine.kv.table import BlockTable, SwappedKV
from llmsched.engine.request import Request
from llmsched.engine.units import human_bytes


def plan_swap(swap_space: int, block_bytes: int, free_bytes: int) -> SwapSpace:
    """Return a swap space of `swap_space` bytes (0: no swap space).

    Raises ConfigError if `swap_space` is more than `free_bytes`, or more than 0 but less than one block.
    """
    if 0 < swap_space < block_bytes:
        raise ConfigError(
            "swap_space", f"{human_bytes(swap_space)} is less than a KV block ({human_bytes(block_bytes)}); set more"
        )
    if swap_space > max(0, free_bytes):
        raise ConfigError(
            "swap_space",
            f"{human_bytes(swap_space)} is more than the {human_bytes(max(0, free_bytes))} of host memory that remain "
            "free; set less",
        )
    return SwapSpace(swap_space // block_bytes, block_bytes)


class SwapSpace:
    """Swap space: blocks 0 .. num_blocks-1 in host memory ("host blocks"), and the next step's copies to and from them.

    A host block is free, held by one preempted request (`Request.swapped`), or about to be copied back.
    """

    def __init__(self, num_blocks: int = 0, block_bytes: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._free: list[int] = []
        self._num_begun = 0  # host blocks used so far; blocks with this index or a higher one are free too
        self._returning: list[int] = []
        self._outs: dict[int, int] = {}
        self._ins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_begun

    def save(self, request: Request, first: int) -> None:
        """Schedule copies of the request's KV to host memory. The caller may release the request's blocks at once.

        In full-attention groups, only blocks from index `first` on are copied. The caller must check that enough host
        blocks are free (`num_free`).
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
        """Schedule copies of the request's KV from host memory to its blocks, and return the number of blocks to copy.

        In full-attention groups, only blocks from index `first` on are copied.
        """
        table, swapped = request.table, request.swapped
        assert swapped is not None
        hosts = swapped.full_blocks[table.layout.full_groups * (first - swapped.first) :] + swapped.window_blocks
        self._ins.update(zip(table.blocks_with_kv(first, swapped.num_tokens), hosts, strict=True))
        self._returning += swapped.host_blocks
        request.swapped = None
        return len(hosts)

    def overwrite(self, block: int) -> None:
        """Cancel a scheduled copy to `block`, because the next step copies other KV to this block."""
        self._ins.pop(block, None)

    def discard(self, request: Request) -> None:
        if request.swapped is None:
            return
        for host in request.swapped.host_blocks:
            self._outs.pop(host, None)
        self._free += reversed(request.swapped.host_blocks)
        request.swapped = None

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies to and from host memory scheduled since the last call.

        Copies to host memory are (block, host block) pairs. Copies from host memory are (host block, block) pairs.
        """
        outs = [(block, host) for host, block in self._outs.items()]
        ins = [(host, block) for block, host in self._ins.items()]
        self._free += reversed(self._returning)
        self._outs, self._ins, self._returning = {}, {}, []
        return outs, ins

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless each host block is free, about to be copied back, or held by one of `holders`."""
        held = [host for request in holders if request.swapped is not None for host in request.swapped.host_blocks]
        everywhere = sorted(held + self._free + self._returning)
        assert everywhere == list(range(self._num_begun)), "a host block is lost or in two places"


class BlockCopies:
    """Copies from block to block at the start of the next step (copy on write).

    Make the copies in order, because a later copy may overwrite the source of an earlier copy.
    """

    def __init__(self, swap: SwapSpace) -> None:
        self._swap = swap
        self._source_of: dict[int, int] = {}

    def note(self, sources: Sequence[int], table: BlockTable, index: int) -> None:
        """Schedule copies of `sources`, one block of each group, to the blocks at `index` of `table`."""
        full, window = table.column(index)
        blocks = [*full, *window]
        for group, source in enumerate(sources):
            if source in blocks:  # the source was just evicted and allocated as a destination: no copy is needed
                other = blocks.index(source)
                blocks[group], blocks[other] = source, blocks[group]
        table.replace(index, 0, blocks)
        for source, destination in zip(sources, blocks, strict=True):
            if source != destination:
                self._source_of[destination] = source
                self._swap.overwrite(destination)

    def pending(self) -> list[tuple[int, int]]:
        """Return the pairs (source, destination) that were scheduled since the last `take()`, in order."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def take(self) -> list[tuple[int, int]]:
        copies = self.pending()
        self._source_of.clear()
        return copies
