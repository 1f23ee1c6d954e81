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


def plan_swap(
    swap_space: int, block_bytes: int, free_bytes: int, *, state_bytes: int = 0, max_num_seqs: int = 1
) -> SwapSpace:
    """Return a swap space of `swap_space` bytes (0: no swap space).

    Up to half of it is for the recurrent states (of `state_bytes` bytes each) of at most `max_num_seqs` sequences.
    Raises ConfigError if `swap_space` is more than `free_bytes`, or more than 0 but too small for one block or state.
    """
    if 0 < swap_space < block_bytes:
        raise ConfigError(
            "swap_space", f"{human_bytes(swap_space)} is less than a KV block ({human_bytes(block_bytes)}); set more"
        )
    if 0 < swap_space < 2 * state_bytes:
        raise ConfigError(
            "swap_space",
            f"{human_bytes(swap_space)} is less than two recurrent states ({human_bytes(state_bytes)} each); set more",
        )
    if swap_space > max(0, free_bytes):
        raise ConfigError(
            "swap_space",
            f"{human_bytes(swap_space)} is more than the {human_bytes(max(0, free_bytes))} of host memory that remain "
            "free; set less",
        )
    num_states = min(max_num_seqs, swap_space // 2 // state_bytes) if state_bytes else 0
    num_blocks = (swap_space - num_states * state_bytes) // block_bytes if block_bytes else 0
    return SwapSpace(num_blocks, block_bytes, num_states)


class HostPlaces:
    """Places 0 .. count-1 in host memory for copies of blocks or states, and the next step's copies to and from them.

    A place is free, held by one preempted request, or about to be copied back.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: list[int] = []
        self._num_begun = 0  # places used so far; places with this index or a higher one are free too
        self._returning: list[int] = []
        self._outs: dict[int, int] = {}
        self._ins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + self.count - self._num_begun

    def save(self, sources: Sequence[int]) -> list[int]:
        """Schedule copies of `sources` to free places, and return the places."""
        places = [self._free.pop() for _ in range(min(len(sources), len(self._free)))]
        begun, self._num_begun = self._num_begun, self._num_begun + len(sources) - len(places)
        places += range(begun, self._num_begun)
        self._outs.update(zip(places, sources, strict=True))
        return places

    def restore(self, places: Sequence[int], destinations: Sequence[int], held: Sequence[int]) -> None:
        """Schedule copies from `places` to `destinations`, after which the places `held` are free."""
        self._ins.update(zip(destinations, places, strict=True))
        self._returning += held

    def overwrite(self, destination: int) -> None:
        """Cancel a scheduled copy to `destination`, because something else is written there."""
        self._ins.pop(destination, None)

    def discard(self, places: Sequence[int]) -> None:
        for place in places:
            self._outs.pop(place, None)
        self._free += reversed(places)

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies scheduled since the last call: pairs (source, place), and pairs (place, destination)."""
        outs = [(source, place) for place, source in self._outs.items()]
        ins = [(place, destination) for destination, place in self._ins.items()]
        self._free += reversed(self._returning)
        self._outs, self._ins, self._returning = {}, {}, []
        return outs, ins

    def check_integrity(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless each place is free, about to be copied back, or in `held`."""
        everywhere = sorted([*held, *self._free, *self._returning])
        assert everywhere == list(range(self._num_begun)), "a place in host memory is lost or in two places"


class SwapSpace:
    """Swap space: host memory for the blocks ("host blocks") and recurrent states of preempted requests."""

    def __init__(self, num_blocks: int = 0, block_bytes: int = 0, num_states: int = 0) -> None:
        self.blocks, self.states = HostPlaces(num_blocks), HostPlaces(num_states)
        self.block_bytes = block_bytes

    @property
    def num_blocks(self) -> int:
        return self.blocks.count

    @property
    def num_free(self) -> int:
        """Number of free host blocks."""
        return self.blocks.num_free

    def has_room(self, request: Request, num_blocks: int) -> bool:
        """Return True if `num_blocks` blocks of a running request, and its recurrent state, find room."""
        return num_blocks <= self.num_free and (request.state is None or self.states.num_free > 0)

    def save(self, request: Request, first: int) -> None:
        """Schedule copies of the request's KV and state to host memory. The caller may release its blocks at once.

        In full-attention groups, only blocks from index `first` on are copied. The caller must check that there is
        room (`has_room`).
        """
        table, num_tokens = request.table, request.num_computed_tokens
        hosts = self.blocks.save(table.blocks_with_kv(first, num_tokens))
        num_full = table.layout.full_groups * (table.layout.width(num_tokens) - first)
        state = None if request.state is None else self.states.save([request.state.slot])[0]
        request.swapped = SwappedKV(first, num_tokens, hosts[:num_full], table.window_start, hosts[num_full:], state)

    def restore(self, request: Request, first: int) -> int:
        """Schedule copies of the request's KV and recurrent state from host memory. Return the number of copies.

        In full-attention groups, only blocks from index `first` on are copied.
        """
        table, swapped = request.table, request.swapped
        assert swapped is not None
        hosts = swapped.full_blocks[table.layout.full_groups * (first - swapped.first) :] + swapped.window_blocks
        self.blocks.restore(hosts, table.blocks_with_kv(first, swapped.num_tokens), swapped.host_blocks)
        if request.state is not None:
            self.states.restore(swapped.host_states, [request.state.slot], swapped.host_states)
        request.swapped = None
        return len(hosts) + len(swapped.host_states)

    def discard(self, request: Request) -> None:
        if request.swapped is None:
            return
        self.blocks.discard(request.swapped.host_blocks)
        self.states.discard(request.swapped.host_states)
        request.swapped = None

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the copies of blocks scheduled since the last call (see `HostPlaces.take`)."""
        return self.blocks.take()

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless each place is free, about to be copied back, or held by one of `holders`."""
        swapped = [request.swapped for request in holders if request.swapped is not None]
        self.blocks.check_integrity([host for each in swapped for host in each.host_blocks])
        self.states.check_integrity([host for each in swapped for host in each.host_states])


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
                self._swap.blocks.overwrite(destination)

    def pending(self) -> list[tuple[int, int]]:
        """Return the pairs (source, destination) that were scheduled since the last `take()`, in order."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def take(self) -> list[tuple[int, int]]:
        copies = self.pending()
        self._source_of.clear()
        return copies
