"""KV memory: gives requests the blocks they need, shares the ones they have in common, takes them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.in_flight import InFlightPrefixes
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.misses import Miss, Misses
from llmsched.engine.kv.pins import Pins, most_pinned_blocks
from llmsched.engine.kv.pool import BlockPool, KVUsage
from llmsched.engine.kv.prefix_cache import PrefixFinder
from llmsched.engine.kv.prefix_tree import NO_HIT, PrefixHit, PrefixTree, encode
from llmsched.engine.kv.swap import BlockCopies, SwapSpace
from llmsched.engine.kv.table import BlockTable, Swapped
from llmsched.engine.request import Request


class StaticBatchBlocks:
    """Blocks of finished requests that a static batch keeps until the batch ends.

    `num_empty` counts the tokens that these blocks have room for but hold no KV of.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: list[list[int]] = []
        self.num_empty = 0

    def add(self, request: Request) -> None:
        """Keep the blocks of a request that is about to be released."""
        blocks = request.table.held_blocks()
        self._pool.acquire(blocks)
        self._blocks.append(blocks)
        self.num_empty += request.table.num_empty(request.num_computed_tokens)

    def release(self) -> None:
        """Release all blocks."""
        for blocks in self._blocks:
            self._pool.release(blocks)
        self._blocks.clear()
        self.num_empty = 0

    def ref_counts(self) -> Counter[int]:
        """Return how many references are held to each block."""
        return Counter(block for blocks in self._blocks for block in blocks)


class KVManager:
    """All KV memory of the engine.

    A request's blocks cover whole blocks of its tokens from the beginning; only blocks whose KV has been written can be
    found by others, and a found block is never written again: at least the last token of a request is always computed,
    into a block of its own. Where that block begins like one that is known, the known part is copied (`BlockCopies`).

    Between two steps a request holds blocks for all its tokens in groups of layers that keep them, and in groups with a
    window what KVLayout says of its computed tokens, or less where it has fewer. In a step those have to hold the
    tokens of a chunk as well (`reach`). The layout is one group that keeps all tokens, unless given.

    At most `max_pinned_blocks` are ever pinned; the rest is what a single request can be sure of.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        max_pinned_blocks: int = 0,
        swap: SwapSpace | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self.block_size = block_size
        self.layout = layout or KVLayout(block_size)
        assert self.layout.block_size == block_size
        self.swap = swap or SwapSpace()
        self.enable_prefix_caching = enable_prefix_caching
        self.prefixes = PrefixTree(block_size)
        self.pool = BlockPool(num_blocks, self._forget)
        self.pins = Pins(self.layout, self.pool, self.prefixes, max_pinned_blocks if enable_prefix_caching else 0)
        self.misses = Misses(self.prefixes)
        self._in_flight = InFlightPrefixes()
        self._finder = PrefixFinder(self.layout, self.prefixes, self._in_flight, self.pool)
        self.copies = BlockCopies(self.swap)
        self.static_batch = StaticBatchBlocks(self.pool)
        self._now = 0.0

    @property
    def max_request_blocks(self) -> int:
        """Blocks that a request can have in any case, if nobody else runs."""
        return self.pool.num_blocks - self.pins.max_blocks

    @property
    def num_pinned(self) -> int:
        """How many of the used blocks pins hold, alone or beside requests."""
        return self.pins.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` tokens holds between two steps."""
        return self.layout.num_blocks(num_tokens)

    # -- before admission -------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest known prefix that leaves at least the last token to compute.

        Requests that want the log-probabilities of their prompt have to compute all of it.
        """
        if self._may_share(request):
            return self._finder.find(request)
        return NO_HIT if request.swapped is None else NO_HIT._replace(from_host=True)

    def find_in_flight(self, request: Request, hit: PrefixHit) -> int:
        """How many tokens beyond the hit running requests are about to write, as whole blocks that then can be found.

        All of them will be there when those have caught up with their tokens.
        """
        return self._finder.num_coming(request, hit) if self._may_share(request) else 0

    def classify(self, request: Request, hit: PrefixHit) -> Miss:
        """Count why the hit ends where it does; once for each request, before it is admitted for the first time."""
        if not self._may_share(request):
            return self.misses.skipped()
        return self.misses.classify(request, hit, self.find_in_flight(request, hit), self._now)

    # -- blocks of a request ----------------------------------------------------------------------------------

    def num_missing(self, request: Request, hit: PrefixHit) -> int:
        """Available blocks that admitting the request with all its tokens would take."""
        layout, width = self.layout, self.layout.width(request.num_tokens)
        missing = layout.full_groups * (width - len(hit.nodes)) + hit.num_evictable
        if not layout.window_groups:
            return missing
        start = self._window_start(request, hit)
        end = min(width, start + layout.num_behind + 1)
        return missing + layout.window_groups * (end - start - len(hit.window_nodes))

    def _window_start(self, request: Request, hit: PrefixHit) -> int:
        """The first block that groups with a window have of a request when it is admitted."""
        return request.swapped.window_start if hit.from_host and request.swapped is not None else hit.window_start

    def admit(self, request: Request, hit: PrefixHit) -> int:
        """Give the request blocks for all its tokens; those of the hit, and those in host memory, count as computed.

        A request that comes back after a preemption finds what it wrote itself, which makes nothing shared. Returns how
        many blocks are copied back from host memory.
        """
        window_start = self._window_start(request, hit)
        swapped = request.swapped if hit.from_host else None
        if swapped is None:
            self.swap.discard(request)
        self.pool.acquire(hit.blocks(), shared=request.num_preemptions == 0)
        source = hit.copy_from if swapped is None else None
        if source is not None:
            self.pool.touch(source)
        request.num_computed_tokens = hit.num_tokens if swapped is None else swapped.num_tokens
        table = BlockTable(self.layout, hit.nodes, request.num_computed_tokens, findable=self.enable_prefix_caching)
        if self.layout.window_groups:
            table.open_window(window_start, hit.window_nodes)
        request.block_table = table
        request.encoded = b""
        self.grow(request)
        num_restored = 0 if swapped is None else self._restore(request, swapped, len(hit.nodes))
        if source is not None:
            self.copies.note(source, table, len(hit.nodes))
        if self.enable_prefix_caching:
            self._in_flight.add(request)
        return num_restored

    def _restore(self, request: Request, swapped: Swapped, start: int) -> int:
        """Copy what host memory holds of the request back, of groups that keep all tokens from block `start` on.

        Returns how many blocks that is.
        """
        table, end = request.table, self.layout.width(swapped.num_tokens)
        slots = swapped.slots[self.layout.full_groups * (start - swapped.first) :] + swapped.window_slots
        blocks = table.full_blocks(start, end)
        if self.layout.window_groups:
            blocks += table.window_blocks(swapped.window_start, end)
        self.swap.restore(request, slots, blocks)
        return len(slots)

    def num_growing(self, request: Request) -> int:
        """Blocks still missing for the request's tokens; 0 or less without them while num_tokens <= table.capacity."""
        layout, table = self.layout, request.table
        width = layout.width(request.num_tokens)
        growing = layout.full_groups * (width - len(table))
        if layout.window_groups:
            growing += layout.window_groups * max(0, self._window_end(table, width) - table.window_end)
        return growing

    def _window_end(self, table: BlockTable, width: int) -> int:
        """Where groups with a window end between two steps, for a request whose tokens take `width` blocks."""
        return min(width, table.window_start + self.layout.num_behind + 1)

    def grow(self, request: Request) -> None:
        """Add the blocks that the request's tokens need; the caller has checked that they are available."""
        table = request.table
        if request.num_tokens <= table.capacity:
            return
        width = self.layout.width(request.num_tokens)
        if width > len(table):
            table.extend(width, self.pool.allocate(self.layout.full_groups * (width - len(table))))
        if self.layout.window_groups and (missing := self._window_end(table, width) - table.window_end) > 0:
            table.extend_window(self.pool.allocate(self.layout.window_groups * missing))

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Add blocks as if the request had so many tokens, as far as there are any beyond what windows may need."""
        layout, table = self.layout, request.table
        spare = self.pool.num_available - layout.window_groups * (layout.num_behind + 1)
        if layout.full_groups:
            width = min(layout.width(num_tokens), len(table) + max(0, spare) // layout.full_groups)
            table.extend(width, self.pool.allocate(layout.full_groups * (width - len(table))))

    def reach(self, request: Request, end: int) -> int:
        """Make room for the KV of the request's tokens before `end` in this step; returns before which there is.

        That is `end`, unless groups with a window find no more blocks for a chunk: it is shorter then. At least one
        token can always be computed.
        """
        table = request.table
        if end > table.capacity:
            wanted = self.layout.width(end) - table.window_end
            count = min(wanted, self.pool.num_available // self.layout.window_groups)
            table.extend_window(self.pool.allocate(self.layout.window_groups * count))
        return min(end, table.capacity)

    def commit(self, request: Request) -> None:
        """Make the request's newly written whole blocks findable, and give back what has left the window.

        Where another request has written the same prefix first, its blocks take the place of ours.
        """
        table = request.table
        if request.num_computed_tokens < table.commit_at:
            return
        num_whole = request.num_computed_tokens // self.block_size
        if table.is_findable:
            self._in_flight.remove(request)
            while table.num_findable < num_whole:
                self._commit_block(request, table)
            self._in_flight.add(request)
            if self.pins.num_waiting:
                self.pins.advance()
        if self.layout.window_groups:
            start = self.layout.first_kept(request.num_computed_tokens)
            if start > table.window_start:
                self.pool.release(table.shrink_window(start))
        table.commit_at = (num_whole + 1) * self.block_size

    def _commit_block(self, request: Request, table: BlockTable) -> None:
        index, full = table.num_findable, self.layout.full_groups
        ours, ours_of_window = table.column(index)
        key = encode(request.token_ids[index * self.block_size : (index + 1) * self.block_size])
        node = self.prefixes.insert(table.node, key, request.cache_salt, ours)
        if node.blocks is ours:
            self.pool.set_findable(ours)
        else:
            self._take_over(table, index, 0, ours, node.blocks)
        if ours_of_window and index >= table.window_start:
            if not node.window_blocks:
                self.prefixes.add_window(node, ours_of_window)
                self.pool.set_findable(ours_of_window)
            else:
                self._take_over(table, index, full, ours_of_window, node.window_blocks)
        table.advance(node)

    def _take_over(
        self, table: BlockTable, index: int, group: int, ours: tuple[int, ...], theirs: tuple[int, ...]
    ) -> None:
        """Put the blocks of a node in the place of ours, from `group` on, unless they are the same."""
        if theirs != ours:
            self.pool.acquire(theirs)
            self.pool.release(ours)
            table.replace(index, group, theirs)

    def release(self, request: Request) -> None:
        """Take back all blocks of a request that has ended or is preempted; what was written stays findable."""
        if self.enable_prefix_caching:
            self._in_flight.remove(request)
        self.pool.release(request.table.held_blocks())
        request.block_table = None
        request.num_computed_tokens = 0

    # -- preemption -------------------------------------------------------------------------------------------

    def num_kept(self, request: Request, demand: int | None) -> int:
        """Whole blocks of the request's beginning that are found again if it loses all its blocks now.

        Those that others hold as well, and with a `demand` of so many blocks (None: of all that can be had) those that
        need not be evicted for it. With windows that is all or nothing: without the end, nothing can go on.
        """
        if not self._may_share(request):
            return 0
        findable = request.table.num_findable
        if demand is not None and demand <= self.pool.num_available:
            return findable
        if self.layout.window_groups:
            return 0
        full = self.layout.full_groups
        kept = 0 if demand is None else findable - -(-(demand - self.pool.num_available) // full)
        return max(kept, self._num_held_by_others(request))

    def num_swapped(self, request: Request) -> int:
        """Blocks that `swap_out` would copy: those with KV, but for the first that others hold as well."""
        return len(self._blocks_with_kv(request, self._num_held_by_others(request)))

    def _blocks_with_kv(self, request: Request, first: int) -> list[int]:
        table, end = request.table, self.layout.width(request.num_computed_tokens)
        blocks = table.full_blocks(first, end)
        return blocks + table.window_blocks(table.window_start, end) if self.layout.window_groups else blocks

    def swap_out(self, request: Request) -> None:
        """Take back all blocks of a request that is preempted, after copying its KV to host memory.

        The caller has checked that there are `num_swapped` slots, and that it was in a step since it was admitted:
        before, its blocks do not hold what they are taken to hold.
        """
        table = request.table
        assert request.num_computed_tokens > table.num_initial, "what is not written cannot be saved"
        first, num_tokens = self._num_held_by_others(request), request.num_computed_tokens
        slots = self.swap.save(self._blocks_with_kv(request, first))
        num_full = self.layout.full_groups * (self.layout.width(num_tokens) - first)
        self.release(request)
        request.swapped = Swapped(first, num_tokens, slots[:num_full], table.window_start, slots[num_full:])

    def _num_held_by_others(self, request: Request) -> int:
        """How many of the first findable blocks that are kept for all tokens others hold as well: requests or pins."""
        if not self._may_share(request) or not self.layout.full_groups:
            return 0
        table = request.table
        blocks = table.ids[0, : table.num_findable].tolist()
        return next((i for i, block in enumerate(blocks) if self.pool.ref_count(block) == 1), len(blocks))

    # -- how memory is used -----------------------------------------------------------------------------------

    def use(self, running: Iterable[Request]) -> KVUsage:
        """How the memory is used now, between two steps, while `running` hold blocks."""
        return KVUsage(
            held=self.pool.num_used * self.block_size,
            empty=self.static_batch.num_empty
            + sum(request.table.num_empty(request.num_computed_tokens) for request in running),
            cached=self.pool.num_cached * self.block_size,
            total=self.pool.num_blocks * self.block_size,
        )

    # -- once a step ------------------------------------------------------------------------------------------

    def expire(self, now: float) -> bool:
        """Tell the time (seconds, the engine's clock): evictions are dated by it, and pins end by it (then True)."""
        self._now = now
        return self.pins.expire(now)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) blocks to copy before anything else of the next step, noted since the last call."""
        return self.copies.take()

    def take_swaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(block, slot) pairs to copy before the copies of `take_copies`, (slot, block) pairs to copy after them.

        In this order, because a block may be saved, then be source or destination of a copy, then be restored to, all
        before it is written to.
        """
        return self.swap.take()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that no running request and no pin holds."""
        self.pool.drop_cached()

    def check_integrity(self, holders: Iterable[Request], swapped: Iterable[Request] = ()) -> None:
        """Raise AssertionError unless every block is accounted for by the given requests, pins and the prefix tree, and
        every slot of host memory by the given swapped requests.
        """
        held = self.pins.ref_counts() + self.static_batch.ref_counts()
        holders = list(holders)
        for request in holders:
            held.update(request.table.held_blocks())
        self.pool.check_integrity(held)
        if self.enable_prefix_caching:
            assert set(holders) == set(self._in_flight.requests()), "a request is not where it writes"
        self.swap.check_integrity(swapped)
        assert self.num_pinned <= self.pins.max_blocks, "too many blocks are pinned"

    def _may_share(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.sampling.prompt_logprobs is None

    def _forget(self, block: int) -> Sequence[int]:
        nodes, others = self.prefixes.remove(block)
        for node in nodes:
            self.misses.evicted(node, self._now)
        return others


def make_kv(
    config: EngineConfig, num_blocks: int, swap: SwapSpace | None = None, layout: KVLayout | None = None
) -> KVManager:
    """The KV memory of an engine with a resolved `config` (max_model_len is set)."""
    assert config.max_model_len is not None
    layout = layout or KVLayout(config.block_size)
    pinned = most_pinned_blocks(num_blocks, config.max_pinned_share, layout.num_blocks(config.max_model_len))
    return KVManager(num_blocks, config.block_size, config.enable_prefix_caching, pinned, swap, layout)
