"""Hashes of cached prefixes, equal in every process: the summary of a prefix cache that a replica publishes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from heapq import nsmallest

from llmsched.engine.kv.prefix_tree import TOKEN_BYTES, PrefixKey, PrefixNode, Root

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
    """Hashes of the prefixes in a prefix tree whose length is a multiple of `blocks_per_hash` blocks.

    The tree calls `add` and `remove`. If there are more than `max_hashes` prefixes, the longest are left out, the
    oldest of equally long ones first. So each prefix of a published prefix is published too.
    """

    def __init__(self, blocks_per_hash: int, max_hashes: int = MAX_HASHES) -> None:
        self._blocks_per_hash = blocks_per_hash
        self._max_hashes = max_hashes
        self._hashes: dict[PrefixNode, bytes] = {}
        self._published: frozenset[bytes] | None = frozenset()

    def add(self, node: PrefixNode) -> None:
        if node.depth % self._blocks_per_hash:
            return
        keys: list[bytes] = []
        ancestor: PrefixNode = node
        for _ in range(self._blocks_per_hash):
            assert ancestor.parent is not None
            keys.append(ancestor.key)
            ancestor = ancestor.parent
        before = root_hash(ancestor.salt) if isinstance(ancestor, Root) else self._hashes.get(ancestor)
        if before is None:  # cached before the summary was made
            return
        self._hashes[node] = next_hash(before, b"".join(reversed(keys)))
        self._published = None

    def remove(self, node: PrefixNode) -> None:
        if self._hashes.pop(node, None) is not None:
            self._published = None

    def hashes(self) -> frozenset[bytes]:
        """Return the hashes of the cached prefixes. The same object is returned until they change."""
        if self._published is None:
            kept: Iterable[PrefixNode] = self._hashes
            if len(self._hashes) > self._max_hashes:
                kept = nsmallest(self._max_hashes, reversed(self._hashes), key=lambda node: node.depth)
            self._published = frozenset(map(self._hashes.__getitem__, kept))
        return self._published
