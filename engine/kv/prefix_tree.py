"""Prefix tree: index of the blocks that hold the KV of known prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias

TOKEN_BYTES = 4
#: Key of a prefix cache: only requests with equal keys share KV. It is the cache_salt of a request without an adapter,
#: else the index of the adapter and the cache_salt.
PrefixKey: TypeAlias = str | tuple[int, str]
#: Limit on the candidates compared to find a partly matching block, newest first: children of a node, or requests that
#: write the block after it.
MAX_COMPARED = 32


def encode(token_ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes, so that a block of tokens is hashed and compared in one operation."""
    return array("i", token_ids).tobytes()


def num_common_tokens(one: bytes, two: bytes) -> int:
    """Return how many leading tokens are equal in two encoded sequences."""
    size = min(len(one), len(two))
    different = int.from_bytes(one[:size], "little") ^ int.from_bytes(two[:size], "little")
    if different == 0:
        return size // TOKEN_BYTES
    return ((different & -different).bit_length() - 1) // (8 * TOKEN_BYTES)


class PrefixNode:
    """Node of the prefix tree: the cached KV of one block of tokens. The path from the root is the whole prefix."""

    __slots__ = ("blocks", "children", "depth", "key", "parent", "path_hash", "state", "window_blocks")

    def __init__(self, key: bytes, blocks: tuple[int, ...], parent: PrefixNode | None, path_hash: int) -> None:
        self.key = key  # encoded tokens
        self.blocks = blocks  # one for each full-attention group
        self.window_blocks: tuple[int, ...] = ()  # one for each sliding-window group, until evicted
        self.state: int | None = None  # slot with the recurrent state after the block, if it was saved
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # blocks in the prefix
        self.path_hash = path_hash  # identifies the prefix and its salt, even after the node is removed
        self.children: dict[bytes, PrefixNode] = {}


class Root(PrefixNode):
    """Root of the prefixes under one salt: the empty prefix, without blocks."""

    __slots__ = ("salt",)

    def __init__(self, salt: PrefixKey) -> None:
        super().__init__(b"", (), None, hash(salt))
        self.salt = salt


class TreeObserver(Protocol):
    """Observer of the nodes of a prefix tree. `add` gets new nodes, each of which is the parent of the next."""

    def add(self, nodes: Sequence[PrefixNode]) -> None: ...

    def remove(self, node: PrefixNode) -> None: ...


class PrefixTree:
    """Tree of token blocks with one root per PrefixKey. Arguments named `salt` are such keys.

    A node's blocks hold KV computed after the tokens of its ancestors, and a block belongs to at most one node. A node
    with children stays in the tree even if its sliding-window blocks are evicted.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.observer: TreeObserver | None = None
        self._key_bytes = block_size * TOKEN_BYTES
        self._roots: dict[PrefixKey, Root] = {}
        self._node_of_block: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._node_of_block)

    def match(
        self, tokens: bytes, salt: PrefixKey, max_blocks: int, first: int = 0, node: PrefixNode | None = None
    ) -> list[PrefixNode]:
        """Return the nodes of the longest prefix of the encoded `tokens` that is in the tree under `salt`.

        `tokens` is divided into blocks, of which only those with index `first` to `max_blocks` - 1 are looked up. If
        `first` is not 0, `node` must be the node of the block before it.
        """
        if node is None and (node := self._roots.get(salt)) is None:
            return []
        path: list[PrefixNode] = []
        children, size = node.children, self._key_bytes
        for start in range(first * size, max_blocks * size, size):
            child = children.get(tokens[start : start + size])
            if child is None:
                break
            path.append(child)
            children = child.children
        return path

    def closest(self, parent: PrefixNode | None, salt: PrefixKey, tokens: bytes) -> tuple[PrefixNode | None, int]:
        """Return the child of `parent` that shares the most leading tokens with `tokens`, and how many it shares.

        `parent` None means the salt's root. `tokens` is at most one encoded block. Returns (None, 0) if no child shares
        a token.
        """
        parent = parent or self._roots.get(salt)
        if parent is None:
            return None, 0
        if (child := parent.children.get(tokens)) is not None:
            return child, self.block_size
        best, most = None, 0
        for child in islice(reversed(parent.children.values()), MAX_COMPARED):
            if (common := num_common_tokens(child.key, tokens)) > most:
                best, most = child, common
        return best, most

    def path_hash(self, parent: PrefixNode | None, salt: PrefixKey, key: bytes) -> int:
        return hash((hash(salt) if parent is None else parent.path_hash, key))

    def insert(
        self, parent: PrefixNode | None, tokens: bytes, salt: PrefixKey, blocks: Sequence[tuple[int, ...]]
    ) -> list[PrefixNode]:
        """Insert blocks under `parent` (None: the salt's root) and return their nodes, each the parent of the next.

        `blocks[i]` are the block ids, one for each full-attention group, of the i-th block of the encoded `tokens`. If
        the tree has a node for these tokens already, this node is returned and `blocks[i]` are not inserted.
        """
        if parent is None and (parent := self._roots.get(salt)) is None:
            parent = self._roots[salt] = Root(salt)
        nodes: list[PrefixNode] = []
        new: list[PrefixNode] = []
        size = self._key_bytes
        for start, ours in zip(range(0, len(tokens), size), blocks, strict=True):
            key = tokens[start : start + size]
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = PrefixNode(key, ours, parent, hash((parent.path_hash, key)))
                for block in ours:
                    self._node_of_block[block] = node
                new.append(node)
            nodes.append(node)
            parent = node
        if new and self.observer is not None:
            self.observer.add(new)
        return nodes

    def add_window(self, node: PrefixNode, blocks: tuple[int, ...]) -> None:
        assert not node.window_blocks
        node.window_blocks = blocks
        self._node_of_block.update(dict.fromkeys(blocks, node))

    def remove(self, block: int) -> tuple[Sequence[PrefixNode], Sequence[int]]:
        """Remove an evicted block from the tree, and the blocks that no lookup can return any more.

        Returns the removed nodes, and the removed blocks other than `block`.
        """
        node = self._node_of_block.pop(block)
        if block in node.window_blocks:
            gone, node.window_blocks = node.window_blocks, ()
            removed = self.prune(node)
        else:
            assert not node.children, f"block {block} evicted before the blocks after it"
            gone, removed = node.blocks + node.window_blocks, [node]
            self._detach(node)
        if len(gone) == 1:
            return removed, ()
        others = [each for each in gone if each != block]
        for each in others:
            del self._node_of_block[each]
        return removed, others

    def prune(self, node: PrefixNode) -> list[PrefixNode]:
        """Remove a node that holds nothing, and ancestors that then hold nothing. Return the removed nodes."""
        removed = []
        while node.parent is not None and not (
            node.blocks or node.children or node.window_blocks or node.state is not None
        ):
            self._detach(node)
            removed.append(node)
            node = node.parent
        return removed

    def attached(self, node: PrefixNode) -> bool:
        """Return True if the node is in the tree: `prune(...)` may have removed it."""
        return node.parent is not None and node.parent.children.get(node.key) is node

    def _detach(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if self.observer is not None:
            self.observer.remove(node)
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.salt]

    def in_other_salt(self, salt: PrefixKey, key: bytes, most: int) -> bool:
        """Return True if a prefix under another salt begins with the tokens `key`.

        Only the `most` newest salts are searched.
        """
        roots = islice(reversed(self._roots.values()), most)
        return any(key in root.children for root in roots if root.salt != salt)


class PrefixHit(NamedTuple):
    """Known prefix of a request, valid until the pool allocates a block."""

    nodes: list[PrefixNode]  # admission acquires their full-attention blocks, and window blocks from window_start on
    num_evictable: int  # blocks to acquire that no request or pin holds now
    num_tokens: int = 0  # tokens with KV, in the blocks of `nodes` and at the beginning of `copy_from`
    copy_from: tuple[int, ...] | None = None  # blocks, one for each group, that admission copies
    num_alike: int = 0  # tokens that match a cached prefix, with or without KV
    window_start: int = 0
    from_host: bool = False  # True if the request resumes from its own KV in host memory

    @property
    def node(self) -> PrefixNode | None:
        return self.nodes[-1] if self.nodes else None

    @property
    def window_nodes(self) -> list[PrefixNode]:
        return self.nodes[self.window_start :]

    def blocks(self) -> list[int]:
        """Return the blocks that admission acquires: full-attention blocks, then sliding-window blocks."""
        return blocks_of(self.nodes, self.window_nodes)


NO_HIT = PrefixHit([], 0)


def blocks_of(nodes: Iterable[PrefixNode], window_nodes: Iterable[PrefixNode]) -> list[int]:
    """Return the full-attention blocks of `nodes`, followed by the sliding-window blocks of `window_nodes`."""
    blocks = [block for node in nodes for block in node.blocks]
    return blocks + [block for node in window_nodes for block in node.window_blocks]
