"""Prefix cache: KV of prompt prefixes that other requests can reuse, even while it is being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.misses import Miss, Misses
from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.prefix_tree import (
    MAX_COMPARED,
    NO_HIT,
    TOKEN_BYTES,
    PrefixHit,
    PrefixKey,
    PrefixNode,
    PrefixTree,
    blocks_of,
    encode,
    num_common_tokens,
)
from llmsched.engine.kv.recurrent_slots import StateSlots
from llmsched.engine.kv.table import BlockTable
from llmsched.engine.request import Request

#: A partly matching block is copied only if at least this many tokens match. Chat templates give any two prompts a few
#: equal tokens, and copying a block in every layer for so few saves almost nothing.
MIN_COPIED = 4


class InFlightPrefixes:
    """Index of running requests, by the prefix that each has in findable blocks (see KVManager)."""

    def __init__(self) -> None:
        self._after: dict[PrefixNode | PrefixKey, dict[Request, None]] = {}

    def add(self, request: Request) -> None:
        self._after.setdefault(_key(request), {})[request] = None

    def remove(self, request: Request) -> None:
        """Remove a request. Call this before the request's findable prefix changes, and `add(...)` afterwards."""
        key = _key(request)
        del self._after[key][request]
        if not self._after[key]:
            del self._after[key]

    def requests(self) -> list[Request]:
        return [request for requests in self._after.values() for request in requests]

    def open_block(self, node: PrefixNode | None, salt: PrefixKey, tokens: bytes) -> tuple[tuple[int, ...], int] | None:
        """Find the partly written block that follows a prefix and has the most leading tokens in common with `tokens`.

        `node` is the node of the prefix (None: the empty prefix under `salt`). `tokens` is at most one encoded block.
        Returns the block ids, one for each group, and the number of common tokens, or None if no block has a token in
        common.
        """
        best: tuple[tuple[int, ...], int] | None = None
        for request in self._newest(node, salt):
            table = request.table
            start, end = table.num_findable * table.layout.block_size, request.num_computed_tokens
            if end > max(start, table.num_initial):
                common = num_common_tokens(encode(request.token_ids[start:end]), tokens)
                if common > (best[1] if best else 0):
                    full, window = table.column(table.num_findable)
                    best = full + window, common
        return best

    def num_coming(self, node: PrefixNode | None, request: Request, start: int, limit: int) -> int:
        """Return the number of tokens of `request` whose KV another running request will write.

        Only whole blocks of the tokens `start` to `limit` - 1 count. `node` is the node of the prefix that ends at
        `start`.
        """
        most = 0
        for other in self._newest(node, request.prefix_key):
            size = other.table.layout.block_size
            if other.token_ids[start : start + size] == request.token_ids[start : start + size]:
                common = _common_length(other.token_ids, request.token_ids, start, limit) - start
                most = max(most, common // size * size)
        return most

    def num_saved(self, node: PrefixNode | None, request: Request, start: int, limit: int) -> int:
        """Return after how many leading tokens of `request` another running request will save its recurrent state.

        Ask other requests to save it at the last block boundary before the prompts diverge, if they have not passed it.
        `start` and `limit` are as in `num_coming`; the result is 0 if no state will be saved.
        """
        most = 0
        for other in self._newest(node, request.prefix_key):
            size, state = other.table.layout.block_size, other.state
            assert state is not None
            common = _common_length(other.token_ids, request.token_ids, start, limit) // size * size
            if common > max(start, other.num_computed_tokens):
                state.save_at.add(common)
            coming = {at for at in state.save_at if at > other.num_computed_tokens} | {at for at, _ in state.saves}
            most = max([most, *(at for at in coming if at <= common)])
        return most

    def _newest(self, node: PrefixNode | None, salt: PrefixKey) -> Iterator[Request]:
        return islice(reversed(self._after.get(salt if node is None else node, {})), MAX_COMPARED)


class PrefixCache:
    """Cache of the KV of prefixes: requests reuse the longest cached prefix and add the blocks that they fill.

    Only requests with equal adapter and cache_salt share blocks. If `enabled` is False, nothing is found or inserted.
    If the model has recurrent layers, `num_states` is the number of slots for their states and `max_running` the
    largest number of running requests.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, enabled: bool, num_states: int = 0, max_running: int = 0
    ) -> None:
        self.enabled = enabled
        self.tree = PrefixTree(layout.block_size)
        self.pool = BlockPool(num_blocks, self._forget)
        self.misses = Misses(self.tree, recurrent=layout.recurrent)
        self.in_flight = InFlightPrefixes()
        self.states = None
        if layout.recurrent:
            self.states = StateSlots(num_states, max_running, layout.block_size, self._lost_state)
        #: Time of the engine's clock in seconds, for the times of evictions.
        self.now = 0.0
        self._layout = layout

    def serves(self, request: Request) -> bool:
        """Return True if the request may use the cache."""
        return self.enabled and request.sampling.prompt_logprobs is None

    # -- lookup -----------------------------------------------------------------------------------------------

    def find(self, request: Request) -> PrefixHit:
        """Return the longest known prefix of the request, without its last token, which is always computed."""
        if not self.serves(request):
            return NO_HIT if request.swapped is None else NO_HIT._replace(from_host=True)
        size, salt, most = self.tree.block_size, request.prefix_key, request.num_tokens - 1
        if not request.encoded:  # kept, because a waiting request is looked up again
            request.encoded = encode(request.token_ids)
        tokens = request.encoded
        found = self.tree.match(tokens, salt, most // size)
        nodes = found[: self._num_usable(found)]
        start, end = len(nodes) * size, len(found) * size
        block = tokens[end * TOKEN_BYTES : (end + size) * TOKEN_BYTES]
        last = found[-1] if found else None
        child, alike = self.tree.closest(last, salt, block)
        source: tuple[int, ...] | None = None
        known = 0
        if start == end and self.states is None:
            # Copy from cached or partly written blocks, whichever share more tokens with `block`.
            if child is not None and (child.window_blocks or not self._layout.window_groups):
                source, known = child.blocks + child.window_blocks, alike
            being_filled = self.in_flight.open_block(last, salt, block)
            if being_filled is not None and being_filled[1] > known:
                source, known = being_filled
            known = min(known, most - start)
        if known < MIN_COPIED:
            source, known = None, 0
        window_start = self._layout.first_kept(start) if self._layout.window_groups else len(nodes)
        swapped = request.swapped
        from_host = swapped is not None and swapped.first <= len(found) and swapped.num_tokens > start + known
        if from_host and swapped is not None and (self._layout.window_groups or self.states is not None):
            # With sliding windows alone, all KV comes from host memory: the request would hold no blocks of the nodes,
            # so they could be evicted at any time.
            nodes = found[: swapped.num_tokens // size] if self._layout.full_groups else []
            start, known, source, window_start = len(nodes) * size, 0, None, len(nodes)
        num_evictable = self.pool.count_cached(blocks_of(nodes, nodes[window_start:]))
        return PrefixHit(nodes, num_evictable, start + known, source, end + alike, window_start, from_host)

    def _num_usable(self, found: list[PrefixNode]) -> int:
        """Return how many leading nodes can be reused.

        The last few nodes must still have their sliding-window blocks, and the very last its recurrent state.
        """
        if self.states is not None:
            return next((count for count in range(len(found), 0, -1) if found[count - 1].state is not None), 0)
        if not self._layout.window_groups:
            return len(found)
        usable = present = 0
        for count, node in enumerate(found, start=1):
            present = present + 1 if node.window_blocks else 0
            if present >= min(count, self._layout.num_behind):
                usable = count
        return usable

    def num_coming(self, request: Request, hit: PrefixHit) -> int:
        """Return how many tokens after the hit, in whole blocks, another running request will compute."""
        if not self.serves(request):
            return 0
        size, limit = self.tree.block_size, request.num_tokens - 1
        start = len(hit.nodes) * size
        if self.states is not None:
            found = self.tree.match(request.encoded, request.prefix_key, limit // size, len(hit.nodes), hit.node)
            node, start = found[-1] if found else hit.node, start + len(found) * size
            return max(0, self.in_flight.num_saved(node, request, start, limit) - hit.num_tokens)
        coming = self.in_flight.num_coming(hit.node, request, start, limit)
        return max(0, start + coming - hit.num_tokens)

    def classify(self, request: Request, hit: PrefixHit) -> Miss:
        """Count and return the reason why the hit is not longer. Call this once per request, before its admission."""
        if not self.serves(request):
            return self.misses.skipped()
        return self.misses.classify(request, hit, self.num_coming(request, hit), self.now)

    # -- insertion -------------------------------------------------------------------------------------------

    def insert(self, request: Request, num_whole: int) -> None:
        """Make the first `num_whole` blocks of a running request findable.

        If another request has inserted the same prefix before, the tree's blocks replace the blocks of this request.
        """
        table, size = request.table, self.tree.block_size
        self.in_flight.remove(request)
        if not self._layout.num_groups:  # no blocks of the request keep its nodes in the tree
            while table.node is not None and not self.tree.attached(table.node):
                table.node, table.num_findable = table.node.parent, table.num_findable - 1
                table.node = table.node if table.num_findable else None
        first = table.num_findable
        if num_whole <= first:
            self.in_flight.add(request)
            return
        blocks, full = iter(table.full_blocks(first, num_whole)), self._layout.full_groups
        columns = list(zip(*[blocks] * full, strict=True)) if full else [()] * (num_whole - first)
        tokens = encode(request.token_ids[first * size : num_whole * size])
        nodes = self.tree.insert(table.node, tokens, request.prefix_key, columns)
        for index, (node, ours) in enumerate(zip(nodes, columns, strict=True), start=first):
            if node.blocks is ours:
                self.pool.set_findable(ours)
            else:
                self._take_over(table, index, 0, ours, node.blocks)
        if self._layout.window_groups:
            self._insert_window(table, nodes)
        table.node, table.num_findable = nodes[-1], num_whole
        self.in_flight.add(request)

    def _insert_window(self, table: BlockTable, nodes: Sequence[PrefixNode]) -> None:
        """Make the sliding-window blocks of `nodes`, which follow the findable blocks of `table`, findable."""
        for index, node in enumerate(nodes, start=table.num_findable):
            if index < table.window_start:
                continue
            _, ours = table.column(index)
            if not node.window_blocks:
                self.tree.add_window(node, ours)
                self.pool.set_findable(ours)
            else:
                self._take_over(table, index, self._layout.full_groups, ours, node.window_blocks)

    def _take_over(
        self, table: BlockTable, index: int, group: int, ours: tuple[int, ...], theirs: tuple[int, ...]
    ) -> None:
        if theirs != ours:
            self.pool.acquire(theirs)
            self.pool.release(ours)
            table.replace(index, group, theirs)

    def drop(self) -> None:
        """Drop all KV and states that neither running requests nor pins hold."""
        self.pool.drop_cached()
        if self.states is not None:
            self.states.pool.drop_cached()

    def _forget(self, block: int) -> Sequence[int]:
        nodes, others = self.tree.remove(block)
        for node in nodes:
            self.misses.evicted(node, self.now)
            if node.state is not None and self.states is not None:
                self.states.pool.evict(node.state)
        return others

    def _lost_state(self, node: PrefixNode) -> None:
        for removed in self.tree.prune(node):
            self.misses.evicted(removed, self.now)


def _key(request: Request) -> PrefixNode | PrefixKey:
    node = request.table.node
    return request.prefix_key if node is None else node


def _common_length(one: Sequence[int], two: Sequence[int], start: int, end: int) -> int:
    """Return the largest n <= end for which one[start:n] == two[start:n]."""
    low, high = start, max(start, end)
    step = high
    while low < high:
        if one[low:step] == two[low:step]:
            low = step
        else:
            high = step - 1
        step = (low + high + 1) // 2
    return low
