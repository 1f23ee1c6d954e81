"""Hashes of cached prefixes, equal in every process: the summary of a prefix cache that a replica publishes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from heapq import nsmallest

from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.prefix_tree import TOKEN_BYTES, PrefixKey, PrefixNode, Root
from llmsched.engine.kv.recurrent_slots import StateSlots

#: Tokens between two hashed prefixes, if the block size divides it.
SPAN = 256
#: Size of a hash.
HASH_BYTES = 8
#: Most hashes in a summary: 128 KiB.
MAX_HASHES = 16_384


def span_of(block_size: int) -> int:
    """Return the tokens between two hashed prefixes: whole blocks, about SPAN tokens."""
    return block_size * max(1, SPAN // block_size)


def root_hash(key: PrefixKey) -> bytes:
    """Return the hash of the empty prefix under a key. Replicas must have the same adapters in the same order."""
    adapter, salt = ("", key) if isinstance(key, str) else key
    person = str(adapter).encode()
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=person).digest()


def next_hash(before: bytes, tokens: bytes) -> bytes:
    """Return the hash of a prefix with hash `before` followed by the encoded `tokens`."""
    return blake2b(tokens, digest_size=HASH_BYTES, key=before).digest()


def prefix_hashes(tokens: bytes, salt: PrefixKey, span: int) -> list[bytes]:
    """Return the hashes of the prefixes of `span`, 2 x `span` ... tokens, without the prompt's last token.

    `tokens` are the encoded tokens of the prompt (see `prefix_tree.encode`). The last token is always computed, so a
    prefix that ends with it is never reused whole.
    """
    hashes, last = [], root_hash(salt)
    size = span * TOKEN_BYTES
    for start in range(0, len(tokens) - size, size):
        last = next_hash(last, tokens[start : start + size])
        hashes.append(last)
    return hashes


class CacheSummary:
    """Hashes of the prefixes in a prefix tree that requests can reuse and that are a multiple of `span` tokens long.

    The tree calls `add` and `remove`. If there are more than `max_hashes` prefixes, the longest are left out, and of
    equally long ones the oldest. Prefixes that lack sliding-window blocks or a recurrent state are left out as well,
    but for a state between two spans, the prefix of the spans before it counts.
    """

    def __init__(
        self, layout: KVLayout, span: int, max_hashes: int = MAX_HASHES, states: StateSlots | None = None
    ) -> None:
        self._layout = layout
        self._blocks_per_hash = span // layout.block_size
        self._max_hashes = max_hashes
        self._states = states
        self._hashes: dict[PrefixNode, bytes] = {}  # parents come before their children
        self._published: frozenset[bytes] | None = frozenset()

    def add(self, nodes: Sequence[PrefixNode]) -> None:
        """Add new nodes of the tree, each of which is the parent of the next."""
        every = self._blocks_per_hash
        for node in nodes[-nodes[0].depth % every :: every]:
            path, ancestor = self._span_before(node)
            before = root_hash(ancestor.salt) if isinstance(ancestor, Root) else self._hashes.get(ancestor)
            if before is not None:  # None: cached before the summary was made
                self._hashes[node] = next_hash(before, b"".join(each.key for each in reversed(path)))
                self._published = None

    def remove(self, node: PrefixNode) -> None:
        if self._hashes.pop(node, None) is not None:
            self._published = None

    def hashes(self) -> frozenset[bytes]:
        """Return the hashes of the reusable prefixes. The same object is returned until the cache changes."""
        if self._published is None or self._states is not None or self._layout.window_groups:
            kept = self._reusable()
            if len(kept) > self._max_hashes:
                kept = nsmallest(self._max_hashes, reversed(kept), key=lambda node: node.depth)
            self._published = frozenset(map(self._hashes.__getitem__, kept))
        return self._published

    def _span_before(self, node: PrefixNode) -> tuple[list[PrefixNode], PrefixNode]:
        """Return the nodes of the span that ends with `node`, last first, and the node before them."""
        path = []
        for _ in range(self._blocks_per_hash):
            path.append(node)
            assert node.parent is not None
            node = node.parent
        return path, node

    def _reusable(self) -> list[PrefixNode]:
        """Return the hashed nodes up to which requests can reuse KV."""
        if self._states is not None:
            return self._with_state(self._states)
        return self._with_windows() if self._layout.window_groups else list(self._hashes)

    def _with_state(self, states: StateSlots) -> list[PrefixNode]:
        found: dict[PrefixNode, None] = {}
        for node in states.nodes():
            for _ in range(node.depth % self._blocks_per_hash):
                assert node.parent is not None
                node = node.parent
            if node in self._hashes:
                found[node] = None
        return list(found)

    def _with_windows(self) -> list[PrefixNode]:
        found = []
        lengths: dict[PrefixNode, int] = {}  # blocks up to a node of which none lacks its sliding-window blocks
        for node in self._hashes:
            path, before = self._span_before(node)
            present = next((count for count, each in enumerate(path) if not each.window_blocks), len(path))
            lengths[node] = present + (lengths.get(before, 0) if present == len(path) else 0)
            if lengths[node] >= min(node.depth, self._layout.num_behind):
                found.append(node)
        return found
