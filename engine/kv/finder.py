"""What is known already of a request's tokens: in the cache, in blocks being filled, or on its way."""

from __future__ import annotations

from typing import NamedTuple

from llmsched.engine.kv.pool import BlockPool
from llmsched.engine.kv.prefix import TOKEN_BYTES, PrefixNode, PrefixTree, encode
from llmsched.engine.kv.writers import Writers
from llmsched.engine.request import Request

#: A partly matching block is copied if that saves at least this many tokens. Fewer are what chat templates make any two
#: prompts begin with: each cold prompt would copy a block, a read and a write in every layer, to save next to nothing.
MIN_COPIED = 4


class PrefixHit(NamedTuple):
    """A known prefix; what was found goes stale when blocks are allocated.

    `num_evictable` of the nodes' blocks are evictable now, so taking them uses up memory. The KV of the first
    `num_tokens` tokens is there: in the nodes' blocks, and, where they go beyond those, in the first part of
    `copy_from`. The first `num_alike` tokens are those of a cached prefix, whether or not their KV is worth copying.
    """

    nodes: list[PrefixNode]
    num_evictable: int
    num_tokens: int = 0
    copy_from: int | None = None
    num_alike: int = 0

    @property
    def node(self) -> PrefixNode | None:
        return self.nodes[-1] if self.nodes else None


NO_HIT = PrefixHit([], 0)


class PrefixFinder:
    """Looks requests up. Requests with the same cache_salt alone see each other's blocks."""

    def __init__(self, prefixes: PrefixTree, writers: Writers, pool: BlockPool) -> None:
        self._prefixes = prefixes
        self._writers = writers
        self._pool = pool

    def find(self, request: Request) -> PrefixHit:
        """The longest known prefix that leaves at least the last token to compute."""
        size, salt, most = self._prefixes.block_size, request.cache_salt, request.num_tokens - 1
        tokens = _encoded(request)
        nodes = self._prefixes.match(tokens, salt, most // size)
        last, start = nodes[-1] if nodes else None, len(nodes) * size
        block = tokens[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES]
        child, alike = self._prefixes.closest(last, salt, block)
        known, source = alike, child.block if child is not None else None
        being_filled = self._writers.open_block(last, salt, block)
        if being_filled is not None and being_filled[1] > known:
            source, known = being_filled
        known = min(known, most - start)
        if known < MIN_COPIED:
            source, known = None, 0
        num_evictable = self._pool.count_cached([node.block for node in nodes])
        return PrefixHit(nodes, num_evictable, start + known, source, start + alike)

    def num_coming(self, request: Request, hit: PrefixHit) -> int:
        """Tokens beyond the hit that running requests are about to write, as whole blocks that then can be found."""
        start = len(hit.nodes) * self._prefixes.block_size
        coming = self._writers.num_coming(hit.node, request, start, request.num_tokens - 1)
        return max(0, start + coming - hit.num_tokens)


def _encoded(request: Request) -> bytes:
    """The request's tokens, encoded; kept with it, since a request that waits is looked up again and again."""
    if not request.encoded:
        request.encoded = encode(request.token_ids)
    return request.encoded
