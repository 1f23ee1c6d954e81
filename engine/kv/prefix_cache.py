"""What is known already of a request's tokens: in the cache, in blocks being filled, or on its way."""

from __future__ import annotations

from llmsched.engine.kv.in_flight import InFlightPrefixes
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.prefix_tree import TOKEN_BYTES, PrefixHit, PrefixNode, PrefixTree, blocks_of, encode
from llmsched.engine.request import Request

#: A partly matching block is copied if that saves at least this many tokens. Fewer are what chat templates make any two
#: prompts begin with: each cold prompt would copy a block, a read and a write in every layer, to save next to nothing.
MIN_COPIED = 4


class PrefixFinder:
    """Looks requests up. Requests with the same cache_salt alone see each other's blocks."""

    def __init__(self, layout: KVLayout, prefixes: PrefixTree, in_flight: InFlightPrefixes, pool: BlockPool) -> None:
        self._layout = layout
        self._prefixes = prefixes
        self._in_flight = in_flight
        self._pool = pool

    def find(self, request: Request) -> PrefixHit:
        """The longest known prefix that leaves at least the last token to compute."""
        size, salt, most = self._prefixes.block_size, request.cache_salt, request.num_tokens - 1
        tokens = _encoded(request)
        found = self._prefixes.match(tokens, salt, most // size)
        nodes = found[: self._num_usable(found)] if self._layout.window_groups else found
        start, end = len(nodes) * size, len(found) * size
        block = tokens[end * TOKEN_BYTES : (end + size) * TOKEN_BYTES]
        last = found[-1] if found else None
        child, alike = self._prefixes.closest(last, salt, block)
        source, known = self._to_copy(last, child, salt, block, alike) if start == end else (None, 0)
        known = min(known, most - start)
        if known < MIN_COPIED:
            source, known = None, 0
        window_start = self._layout.first_kept(start) if self._layout.window_groups else len(nodes)
        swapped = request.swapped
        from_host = swapped is not None and swapped.first <= len(found) and swapped.num_tokens > start + known
        if from_host and swapped is not None and self._layout.window_groups:
            # Without their blocks held, nodes may go at any time: with windows alone, all comes from host memory.
            nodes = found[: swapped.num_tokens // size] if self._layout.full_groups else []
            start, known, source, window_start = len(nodes) * size, 0, None, len(nodes)
        num_evictable = self._pool.count_cached(blocks_of(nodes, nodes[window_start:]))
        return PrefixHit(nodes, num_evictable, start + known, source, end + alike, window_start, from_host)

    def _num_usable(self, found: list[PrefixNode]) -> int:
        """How many of the nodes a sequence can go on after: up to where a window's worth is there in every group."""
        usable = present = 0
        for count, node in enumerate(found, start=1):
            present = present + 1 if node.window_blocks else 0
            if present >= min(count, self._layout.num_behind):
                usable = count
        return usable

    def _to_copy(
        self, last: PrefixNode | None, child: PrefixNode | None, salt: str, block: bytes, alike: int
    ) -> tuple[tuple[int, ...] | None, int]:
        """Blocks behind `last` that begin as `block` does, one of each group, and for how many tokens."""
        source: tuple[int, ...] | None = None
        known = 0
        if child is not None and (child.window_blocks or not self._layout.window_groups):
            source, known = child.blocks + child.window_blocks, alike
        being_filled = self._in_flight.open_block(last, salt, block)
        if being_filled is not None and being_filled[1] > known:
            source, known = being_filled
        return source, known

    def num_coming(self, request: Request, hit: PrefixHit) -> int:
        """Tokens beyond the hit that running requests are about to write, as whole blocks that then can be found."""
        start = len(hit.nodes) * self._prefixes.block_size
        coming = self._in_flight.num_coming(hit.node, request, start, request.num_tokens - 1)
        return max(0, start + coming - hit.num_tokens)


def _encoded(request: Request) -> bytes:
    """The request's tokens, encoded; kept with it, since a request that waits is looked up again and again."""
    if not request.encoded:
        request.encoded = encode(request.token_ids)
    return request.encoded
