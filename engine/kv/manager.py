"""KV memory: gives requests the blocks they need, shares the ones they have in common, takes them back."""

from __future__ import annotations

from collections.abc import Iterable

from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.finder import NO_HIT, PrefixFinder, PrefixHit
from llmsched.engine.kv.misses import Miss, Misses
from llmsched.engine.kv.pins import Pins, most_pinned_blocks
from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.prefix import PrefixTree, encode
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.kv.table import BlockTable, table_of
from llmsched.engine.kv.use import KVUse, num_empty
from llmsched.engine.kv.writers import Writers
from llmsched.engine.request import Request


class KVManager:
    """All KV memory of the engine.

    A request's blocks cover whole blocks of its tokens from the beginning; only blocks whose KV has been written can be
    found by others, and a found block is never written again: at least the last token of a request is always computed,
    into a block of its own. Where that block begins like one that is known, the known part is copied (`take_copies`).

    At most `max_pinned_blocks` are ever pinned; the rest is what a single request can be sure of.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        max_pinned_blocks: int = 0,
        swap: SwapSpace | None = None,
    ) -> None:
        self.block_size = block_size
        self.swap = swap or SwapSpace()
        self.enable_prefix_caching = enable_prefix_caching
        self.prefixes = PrefixTree(block_size)
        self.pool = BlockPool(num_blocks, self._forget)
        self.pins = Pins(self.pool, self.prefixes, max_pinned_blocks if enable_prefix_caching else 0)
        self.misses = Misses(self.prefixes)
        self._writers = Writers()
        self._finder = PrefixFinder(self.prefixes, self._writers, self.pool)
        self._copies: dict[int, int] = {}
        self._now = 0.0
        self._held: list[list[int]] = []
        self._num_held_empty = 0

    @property
    def max_request_blocks(self) -> int:
        """Blocks that a request can have in any case, if nobody else runs."""
        return self.pool.num_blocks - self.pins.max_blocks

    @property
    def num_pinned(self) -> int:
        """How many of the used blocks pins hold, alone or beside requests."""
        return self.pins.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    # -- before admission -------------------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest known prefix that leaves at least the last token to compute.

        Requests that want the log-probabilities of their prompt have to compute all of it.
        """
        return self._finder.find(request) if self._may_share(request) else NO_HIT

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
        return self.num_blocks_for(request.num_tokens) - len(hit.nodes) + hit.num_evictable

    def admit(self, request: Request, hit: PrefixHit) -> int:
        """Give the request blocks for all its tokens; those of the hit, and those in host memory, count as computed.

        A request that comes back after a preemption finds what it wrote itself, which makes nothing shared. Returns how
        many blocks are copied back from host memory.
        """
        num_restored = self._num_restorable(request, hit)
        source = hit.copy_from if num_restored == 0 else None
        self.pool.acquire([node.block for node in hit.nodes], shared=request.num_preemptions == 0)
        if source is not None:
            self.pool.touch(source)
        request.num_computed_tokens = request.swapped.num_tokens if request.swapped is not None else hit.num_tokens
        table = BlockTable(self.block_size, hit.nodes, request.num_computed_tokens, findable=self.enable_prefix_caching)
        request.block_table = table
        request.encoded = b""
        self.grow(request)
        if num_restored:
            start = len(hit.nodes)
            self.swap.restore(request, start, table.ids[start : start + num_restored].tolist())
        if source is not None:
            self._copy(source, int(table.ids[len(hit.nodes)]))
        if self.enable_prefix_caching:
            self._writers.add(request)
        return num_restored

    def _num_restorable(self, request: Request, hit: PrefixHit) -> int:
        """How many blocks behind the hit host memory holds; if that is of no use, it is given up."""
        swapped = request.swapped
        if swapped is None:
            return 0
        if swapped.first <= len(hit.nodes) and swapped.num_tokens > hit.num_tokens:
            return swapped.first + len(swapped.slots) - len(hit.nodes)
        self.swap.discard(request)
        return 0

    def _copy(self, source: int, destination: int) -> None:
        if source != destination:  # it may have been evicted just now, to become the destination
            self._copies[destination] = source
            self.swap.overwrite(destination)

    def num_growing(self, request: Request) -> int:
        """Blocks still missing for the request's tokens; 0 or less without them while num_tokens <= table.capacity."""
        return self.num_blocks_for(request.num_tokens) - len(table_of(request))

    def grow(self, request: Request) -> None:
        """Add the blocks that the request's tokens need; the caller has checked that they are available."""
        table = table_of(request)
        if request.num_tokens > table.capacity:
            table.extend(self.pool.allocate(self.num_growing(request)))

    def commit(self, request: Request) -> None:
        """Make the request's newly written whole blocks findable.

        Where another request has written the same prefix first, its block takes the place of ours.
        """
        table = table_of(request)
        if request.num_computed_tokens < table.commit_at:
            return
        self._writers.remove(request)
        while request.num_computed_tokens >= table.commit_at:
            self._commit_block(request, table)
        self._writers.add(request)
        if self.pins.num_waiting:
            self.pins.advance()

    def _commit_block(self, request: Request, table: BlockTable) -> None:
        index = table.num_findable
        block = int(table.ids[index])
        key = encode(request.token_ids[index * self.block_size : (index + 1) * self.block_size])
        node = self.prefixes.insert(table.node, key, request.cache_salt, block)
        if node.block == block:
            self.pool.set_findable(block)
        else:
            self.pool.acquire([node.block])
            self.pool.release([block])
            table.replace(index, node.block)
        table.advance(node)

    def release(self, request: Request) -> None:
        """Take back all blocks of a request that has ended or is preempted; what was written stays findable."""
        if self.enable_prefix_caching:
            self._writers.remove(request)
        self.pool.release(reversed(table_of(request).ids.tolist()))
        request.block_table = None
        request.num_computed_tokens = 0

    # -- preemption -------------------------------------------------------------------------------------------

    def num_kept(self, request: Request, demand: int | None) -> int:
        """Whole blocks of the request's beginning that are found again if it loses all its blocks now.

        Those that others hold as well, and with a `demand` of so many blocks (None: of all that can be had) those that
        need not be evicted for it.
        """
        if not self._may_share(request):
            return 0
        findable = table_of(request).num_findable
        if demand is not None and demand <= self.pool.num_available:
            return findable
        kept = 0 if demand is None else findable - (demand - self.pool.num_available)
        return max(kept, self._num_held_by_others(request))

    def num_swapped(self, request: Request) -> int:
        """Blocks that `swap_out` would copy: those with KV, but for the first that others hold as well."""
        return self.num_blocks_for(request.num_computed_tokens) - self._num_held_by_others(request)

    def swap_out(self, request: Request) -> None:
        """Take back all blocks of a request that is preempted, after copying its KV to host memory.

        The caller has checked that there are `num_swapped` slots, and that it was in a step since it was admitted:
        before, its blocks do not hold what they are taken to hold.
        """
        table = table_of(request)
        assert request.num_computed_tokens > table.num_initial, "what is not written cannot be saved"
        first, end = self._num_held_by_others(request), self.num_blocks_for(request.num_computed_tokens)
        self.swap.save(request, first, table.ids[first:end].tolist())
        self.release(request)

    def _num_held_by_others(self, request: Request) -> int:
        """How many of the first findable blocks others hold as well: running requests, or pins."""
        if not self._may_share(request):
            return 0
        table = table_of(request)
        blocks = table.ids[: table.num_findable].tolist()
        return next((i for i, block in enumerate(blocks) if self.pool.ref_count(block) == 1), len(blocks))

    # -- static batches ---------------------------------------------------------------------------------------

    def hold(self, request: Request) -> None:
        """Keep the blocks of a request that ends from being used by others until `release_held`."""
        blocks = table_of(request).ids.tolist()
        self.pool.acquire(blocks)
        self._held.append(blocks)
        self._num_held_empty += num_empty(request)

    def release_held(self) -> None:
        """Give back what `hold` kept."""
        for blocks in self._held:
            self.pool.release(reversed(blocks))
        self._held.clear()
        self._num_held_empty = 0

    # -- how memory is used -----------------------------------------------------------------------------------

    def use(self, running: Iterable[Request]) -> KVUse:
        """How the memory is used now, between two steps, while `running` hold blocks."""
        return KVUse(
            held=self.pool.num_used * self.block_size,
            empty=self._num_held_empty + sum(num_empty(request) for request in running),
            cached=self.pool.num_cached * self.block_size,
            total=self.pool.num_blocks * self.block_size,
        )

    # -- once a step ------------------------------------------------------------------------------------------

    def expire(self, now: float) -> bool:
        """Tell the time (seconds, the engine's clock): evictions are dated by it, and pins end by it (then True)."""
        self._now = now
        return self.pins.expire(now)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) blocks to copy before anything else of the next step, noted since the last call.

        Why that is safe: only blocks written in earlier steps are sources, so a source holds what it is copied for when
        the copy is noted. From then on it may be evicted and given to another, but nothing is written to it before the
        step, and copies come first in it. It may become the destination of a later copy, but was none of an earlier
        one, and a destination occurs once, as that of its last owner: so in order, or with all sources read first,
        each block gets what was meant.
        """
        copies, self._copies = self._copies, {}
        return [(source, destination) for destination, source in copies.items()]

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
        held = self.pins.holds()
        for blocks in self._held:
            held.update(blocks)
        holders = list(holders)
        for request in holders:
            held.update(table_of(request).ids.tolist())
        self.pool.check_integrity(held)
        if self.enable_prefix_caching:
            assert set(holders) == set(self._writers.requests()), "a request is not where it writes"
        self.swap.check_integrity(swapped)
        assert self.num_pinned <= self.pins.max_blocks, "too many blocks are pinned"

    def _may_share(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.sampling.prompt_logprobs is None

    def _forget(self, block: int) -> None:
        self.misses.evicted(self.prefixes.remove(block), self._now)


def make_kv(config: EngineConfig, num_blocks: int, swap: SwapSpace | None = None) -> KVManager:
    """The KV memory of an engine with a resolved `config` (max_model_len is set)."""
    assert config.max_model_len is not None
    longest = -(-config.max_model_len // config.block_size)
    pinned = most_pinned_blocks(num_blocks, config.max_pinned_share, longest)
    return KVManager(num_blocks, config.block_size, config.enable_prefix_caching, pinned, swap)
