"""Manager of KV memory: allocates blocks to requests, shares equal prefixes, releases blocks."""

from __future__ import annotations

from collections.abc import Iterable

from llmsched.engine.config import ResolvedConfig
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.pins import Pins, most_pinned_blocks
from llmsched.engine.kv.pool import KVUsage
from llmsched.engine.kv.prefix_cache import PrefixCache
from llmsched.engine.kv.prefix_tree import PrefixHit
from llmsched.engine.kv.recurrent_slots import num_saved_blocks
from llmsched.engine.kv.recurrent_state import RowState, StateMoves, num_state_slots
from llmsched.engine.kv.request_blocks import RequestBlocks, StaticBatchBlocks
from llmsched.engine.kv.swap import BlockCopies, SwapSpace
from llmsched.engine.kv.table import BlockTable
from llmsched.engine.request import Request


class KVManager:
    """Manager of all KV memory of an engine.

    A block is findable if prefix lookup can return it to other requests. Only full blocks are findable, and the engine
    never writes to a findable block. At least the last token of a request is always computed, into a block that the
    request does not share.

    Between two steps, a request holds blocks for all its tokens in each full-attention group. In each sliding-window
    group, it holds the blocks that KVLayout describes. During a step, sliding-window groups also need room for the
    tokens that the step computes (see `RequestBlocks.reach`). If the model has recurrent layers, a running request
    also holds one of `num_states` slots for its state. At most `max_running` requests may run at the same time.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        *,
        enable_prefix_caching: bool = True,
        max_pinned_blocks: int = 0,
        swap: SwapSpace | None = None,
        num_states: int = 0,
        max_pinned_states: int = 0,
        max_running: int = 0,
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.swap = swap or SwapSpace()
        self.prefix_cache = PrefixCache(layout, num_blocks, enable_prefix_caching, num_states, max_running)
        self.pool, self.states = self.prefix_cache.pool, self.prefix_cache.states
        tree, caches = self.prefix_cache.tree, enable_prefix_caching
        self.pins = Pins(
            layout, self.pool, tree, max_pinned_blocks if caches else 0, self.states, max_pinned_states if caches else 0
        )
        self.copies = BlockCopies(self.swap)
        self.blocks = RequestBlocks(layout, self.pool)
        self.static_batch = StaticBatchBlocks(self.pool)

    @property
    def max_request_blocks(self) -> int:
        """Number of blocks that a request can always get when it runs alone."""
        return self.pool.num_blocks - self.pins.max_blocks

    # -- admission --------------------------------------------------------------------------------------------

    def num_missing(self, request: Request, hit: PrefixHit) -> int:
        """Return how many available (free or cached) blocks `admit(...)` would take for the request."""
        layout, width = self.layout, self.layout.width(request.num_tokens)
        missing = layout.full_groups * (width - len(hit.nodes)) + hit.num_evictable
        if not layout.window_groups:
            return missing
        start = self._window_start(request, hit)
        end = min(width, start + layout.num_behind + 1)
        return missing + layout.window_groups * (end - start - len(hit.window_nodes))

    def _window_start(self, request: Request, hit: PrefixHit) -> int:
        return request.swapped.window_start if hit.from_host and request.swapped is not None else hit.window_start

    def admit(self, request: Request, hit: PrefixHit) -> int:
        """Give a request blocks for all its tokens. Return the number of blocks and states copied from host memory."""
        window_start = self._window_start(request, hit)
        swapped = request.swapped if hit.from_host else None
        if swapped is None:
            self.swap.discard(request)
        self.pool.acquire(hit.blocks(), shared=request.num_preemptions == 0)
        source = hit.copy_from if swapped is None else None
        if source is not None:
            self.pool.touch(source)
        request.num_computed_tokens = hit.num_tokens if swapped is None else swapped.num_tokens
        table = BlockTable(self.layout, hit.nodes, request.num_computed_tokens, findable=self.prefix_cache.enabled)
        if self.layout.window_groups:
            table.open_window(window_start, hit.window_nodes)
        request.block_table = table
        request.encoded = b""
        self.blocks.grow(request)
        self._open_state(request, hit)
        num_restored = 0 if swapped is None else self.swap.restore(request, len(hit.nodes))
        if source is not None:
            self.copies.note(source, table, len(hit.nodes))
        if self.prefix_cache.enabled:
            self.prefix_cache.in_flight.add(request)
        return num_restored

    def _open_state(self, request: Request, hit: PrefixHit) -> None:
        if self.states is None:
            return
        source = None if hit.node is None or hit.from_host else hit.node.state
        # A snapshot is kept where the prompt ends, and where it diverges from cached prompts. The end excludes the last
        # token, because the same prompt computes it again. A pin has no output, so only longer prompts reuse it, whole.
        reused = request.num_tokens - (request.sampling.max_tokens > 0)
        end = reused // self.block_size * self.block_size
        parting = min(end, hit.num_alike // self.block_size * self.block_size)
        self.states.open(request, source, {at for at in (end, parting) if at > request.num_computed_tokens})
        assert request.state is not None
        self.swap.states.overwrite(request.state.slot)

    # -- a running request ------------------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Make the request's newly filled blocks findable, and release blocks that have left the sliding window."""
        table = request.table
        if request.num_computed_tokens < table.commit_at:
            return
        num_whole = request.num_computed_tokens // self.block_size
        if table.is_findable:
            findable = num_whole
            if self.states is not None and not self.layout.num_groups:  # nodes without blocks or states are useless
                findable = self.states.num_saved_tokens(request) // self.block_size
            self.prefix_cache.insert(request, findable)
            if self.states is not None:
                self.states.commit(request)
            if self.pins.num_waiting:
                self.pins.advance()
        if self.layout.window_groups:
            start = self.layout.first_kept(request.num_computed_tokens)
            if start > table.window_start:
                self.pool.release(table.shrink_window(start))
        table.commit_at = (num_whole + 1) * self.block_size

    def release(self, request: Request) -> None:
        """Release all blocks of a request that has finished or is preempted. Findable blocks stay in the cache."""
        if self.prefix_cache.enabled:
            self.prefix_cache.in_flight.remove(request)
        self.pool.release(request.table.held_blocks())
        if self.states is not None:
            self.states.close(request)
        request.block_table = None
        request.num_computed_tokens = 0

    def row_state(self, request: Request, num_tokens: int) -> RowState | None:
        """Return the recurrent state of a row with the next `num_tokens` tokens; None if the model has no state."""
        if self.states is None:
            return None
        start = request.num_computed_tokens
        return self.states.row(request, start, start + num_tokens, save=request.table.is_findable)

    def take_state_moves(self) -> StateMoves:
        """Return the copies of recurrent states scheduled since the last call."""
        return StateMoves() if self.states is None else StateMoves(self.states.take_copies(), *self.swap.states.take())

    # -- preemption -------------------------------------------------------------------------------------------

    def num_kept(self, request: Request, demand: int | None) -> int:
        """Return how many leading blocks of each group the request would find again if it were preempted now.

        `demand` is the number of blocks that other requests take before the request resumes. None means all blocks that
        the pool can give.
        """
        if not self.prefix_cache.serves(request):
            return 0
        findable = request.table.num_findable if self.states is None else num_saved_blocks(request.table)
        if demand is not None and demand <= self.pool.num_available:
            return findable
        if self.layout.window_groups or self.states is not None:
            return 0
        full = self.layout.full_groups
        kept = 0 if demand is None else findable - -(-(demand - self.pool.num_available) // full)
        return max(kept, self._num_held_by_others(request))

    def num_swapped(self, request: Request) -> int:
        """Return how many blocks `swap_out(...)` would copy.

        Blocks with KV are copied, except leading blocks that other requests or pins hold too.
        """
        return len(request.table.blocks_with_kv(self._num_held_by_others(request), request.num_computed_tokens))

    def may_swap(self, request: Request, num_blocks: int) -> bool:
        """Return True if the request has KV or recurrent state to swap out, and there is room for it."""
        holds = num_blocks > 0 or (request.state is not None and request.num_computed_tokens > 0)
        return holds and self.swap.has_room(request, num_blocks)

    def swap_out(self, request: Request) -> None:
        """Schedule copies of a preempted request's KV to host memory, and release all blocks of the request.

        The caller must check that swap space for `num_swapped(request)` blocks and the recurrent state is free, and
        that a step has computed tokens of the request since its admission.
        """
        assert request.num_computed_tokens > request.table.num_initial, "the request has not been in a step yet"
        self.swap.save(request, self._num_held_by_others(request))
        self.release(request)

    def _num_held_by_others(self, request: Request) -> int:
        if not self.prefix_cache.serves(request) or not self.layout.full_groups:
            return 0
        table = request.table
        blocks = table.ids[0, : table.num_findable].tolist()
        return next((i for i, block in enumerate(blocks) if self.pool.ref_count(block) == 1), len(blocks))

    # -- state ------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> bool:
        """Set the cache's time to `now` (engine's clock) and delete expired pins. Return True if a pin had expired."""
        self.prefix_cache.now = now
        return self.pins.expire(now)

    def usage(self, running: Iterable[Request]) -> KVUsage:
        """Return how KV memory is used between two steps. `running` are all requests that hold blocks."""
        empty = sum(request.table.num_empty(request.num_computed_tokens) for request in running)
        return KVUsage(
            held=self.pool.num_used * self.block_size,
            empty=self.static_batch.num_empty + empty,
            cached=self.pool.num_cached * self.block_size,
            total=self.pool.num_blocks * self.block_size,
        )

    def check_integrity(self, holders: Iterable[Request], swapped: Iterable[Request] = ()) -> None:
        """Raise AssertionError unless each block has exactly the references that its owners hold.

        `holders` are all requests that hold blocks. `swapped` must include all requests that hold host blocks.
        """
        held = self.pins.ref_counts() + self.static_batch.ref_counts()
        holders = list(holders)
        for request in holders:
            held.update(request.table.held_blocks())
        self.pool.check_integrity(held)
        if self.states is not None:
            self.states.check_integrity(holders, self.pins.held_states())
        if self.prefix_cache.enabled:
            assert set(holders) == set(self.prefix_cache.in_flight.requests()), "in_flight is out of date"
        self.swap.check_integrity(swapped)
        assert self.pins.num_blocks <= self.pins.max_blocks, "too many blocks are pinned"


def make_kv(
    config: ResolvedConfig,
    num_blocks: int,
    swap: SwapSpace | None = None,
    layout: KVLayout | None = None,
    num_states: int | None = None,
) -> KVManager:
    """Return the manager of `num_blocks` blocks and of `num_states` recurrent states (None: as many as planned)."""
    layout = layout or KVLayout(config.block_size)
    if num_states is None:
        num_states = num_state_slots(config.max_num_seqs, enable_prefix_caching=config.enable_prefix_caching)
    pinned = most_pinned_blocks(num_blocks, config.max_pinned_share, layout.num_blocks(config.max_model_len))
    return KVManager(
        num_blocks,
        layout,
        enable_prefix_caching=config.enable_prefix_caching,
        max_pinned_blocks=pinned,
        swap=swap,
        num_states=num_states,
        max_pinned_states=min(int(config.max_pinned_share * num_states), num_states - config.max_num_seqs),
        max_running=config.max_num_seqs,
    )
