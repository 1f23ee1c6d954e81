"""The prefix tree: which blocks hold the KV of a given beginning of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

TOKEN_BYTES = 4
#: How many of the children of a node are compared for a partly matching block, newest first.
MAX_COMPARED = 32


def encode(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32, one to one: a block of them is hashed and compared as a whole, at the speed of memory."""
    return array("i", token_ids).tobytes()


def num_common_tokens(one: bytes, two: bytes) -> int:
    """How many leading tokens two encoded sequences share: the first bit that differs says which token does."""
    size = min(len(one), len(two))
    different = int.from_bytes(one[:size], "little") ^ int.from_bytes(two[:size], "little")
    if different == 0:
        return size // TOKEN_BYTES
    return ((different & -different).bit_length() - 1) // (8 * TOKEN_BYTES)


class PrefixNode:
    """The cached KV of one block of tokens: `key` are these (encoded), the path from the root is the whole prefix.

    `blocks` are those of the groups of layers that keep all tokens, one each. `window_blocks` are those of the groups
    with a window; they may be gone, which leaves none: then nothing can follow on this block, or on one less
    than a window behind it, but what is behind that can be found.

    The children are found by their tokens themselves: the dictionary hashes to filter and compares to decide, so two
    prefixes are equal only if every token is. `path_hash` stands for the whole path and its salt, to remember it by
    when it is gone.
    """

    __slots__ = ("blocks", "children", "key", "parent", "path_hash", "window_blocks")

    def __init__(self, key: bytes, blocks: tuple[int, ...], parent: PrefixNode | None, path_hash: int) -> None:
        self.key = key
        self.blocks = blocks
        self.window_blocks: tuple[int, ...] = ()
        self.parent = parent
        self.path_hash = path_hash
        self.children: dict[bytes, PrefixNode] = {}


class Root(PrefixNode):
    """The empty prefix under a salt; has no blocks."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(b"", (), None, hash(salt))
        self.salt = salt


class PrefixTree:
    """Tree over token ids at block granularity, one root per cache salt.

    Invariants: a node's blocks hold the written KV of its tokens after those of its ancestors; a block has at most one
    node; a node is removed only when it has no children (the pool evicts ends before beginnings, but not what has left
    a window: nodes without blocks stay while there are any behind them).
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._key_bytes = block_size * TOKEN_BYTES
        self._roots: dict[str, Root] = {}
        self._node_of_block: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._node_of_block)

    def match(self, tokens: bytes, salt: str, max_blocks: int) -> list[PrefixNode]:
        """The nodes of the longest known prefix of the encoded tokens, at most `max_blocks` of them.

        Stops at the first that is missing.
        """
        return self.follow(None, salt, tokens, 0, max_blocks)

    def follow(
        self, node: PrefixNode | None, salt: str, tokens: bytes, first: int, max_blocks: int
    ) -> list[PrefixNode]:
        """As `match`, but only blocks `first` .. `max_blocks` - 1 of the tokens; `node` is that of the block before."""
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

    def closest(self, parent: PrefixNode | None, salt: str, tokens: bytes) -> tuple[PrefixNode | None, int]:
        """The child of `parent` (None: the salt's root) that shares most leading tokens with a block (or less).

        Returns the child, None if none shares any, and how many tokens it shares. Exact if the block itself is there or
        there are at most MAX_COMPARED children, else a lower bound.
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

    def path_hash(self, parent: PrefixNode | None, salt: str, key: bytes) -> int:
        """The `path_hash` that a child of `parent` (None: the salt's root) with these tokens has, or would have."""
        return hash((hash(salt) if parent is None else parent.path_hash, key))

    def insert(self, parent: PrefixNode | None, key: bytes, salt: str, blocks: tuple[int, ...]) -> PrefixNode:
        """Make blocks with the tokens `key` findable below `parent` (None: the salt's root).

        Returns the node of these tokens: a new one for `blocks`, or the one that another sequence has put there before.
        """
        if parent is None and (parent := self._roots.get(salt)) is None:
            parent = self._roots[salt] = Root(salt)
        node = parent.children.get(key)
        if node is None:
            node = PrefixNode(key, blocks, parent, self.path_hash(parent, salt, key))
            parent.children[key] = node
            self._own(node, blocks)
        return node

    def add_window(self, node: PrefixNode, blocks: tuple[int, ...]) -> None:
        """Give a node the blocks of groups with a window, of which it has none."""
        assert not node.window_blocks
        node.window_blocks = blocks
        self._own(node, blocks)

    def _own(self, node: PrefixNode, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._node_of_block[block] = node

    def remove(self, block: int) -> tuple[Sequence[PrefixNode], Sequence[int]]:
        """Forget a block that the pool evicts: with its node, or, if it is one of `window_blocks`, with those alone.

        Returns the nodes that are gone, and the other blocks that cannot be found any more. Where there are only groups
        with a window, a node that has lost its blocks goes when nothing is behind it.
        """
        node = self._node_of_block.pop(block)
        if block in node.window_blocks:
            gone, node.window_blocks = node.window_blocks, ()
            removed = [] if node.blocks else self._prune(node)
        else:
            assert not node.children, f"block {block} evicted before the blocks behind it"
            gone, removed = node.blocks + node.window_blocks, [node]
            self._detach(node)
        if len(gone) == 1:
            return removed, ()
        others = [each for each in gone if each != block]
        for each in others:
            del self._node_of_block[each]
        return removed, others

    def _prune(self, node: PrefixNode) -> list[PrefixNode]:
        """Remove a node without blocks, and those in front of it that have none either, up to one that is of use."""
        removed = []
        while node.parent is not None and not node.children and not node.window_blocks:
            parent = node.parent
            self._detach(node)
            removed.append(node)
            node = parent
        return removed

    def _detach(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.salt]  # tenants come and go: a salt without blocks leaves nothing behind

    def in_other_salt(self, salt: str, key: bytes, most: int) -> bool:
        """Whether, among the `most` newest salts, another one than `salt` has a prefix that begins with this block."""
        roots = islice(reversed(self._roots.values()), most)
        return any(key in root.children for root in roots if root.salt != salt)


class PrefixHit(NamedTuple):
    """A known prefix; what was found goes stale when blocks are allocated.

    `num_evictable` of the blocks that admission takes over from the nodes are evictable now, so taking them uses up
    memory: all blocks of groups that keep all tokens, and those of groups with a window from nodes[window_start] on.
    The KV of the first `num_tokens` tokens is there: in the nodes' blocks, and, where they go beyond those, in the
    first part of `copy_from` (a block of each group). The first `num_alike` tokens are those of a cached prefix,
    whether or not their KV is worth copying, or is still there in every group. `from_host`: host memory has more of the
    request than the cache, and what its windows see.
    """

    nodes: list[PrefixNode]
    num_evictable: int
    num_tokens: int = 0
    copy_from: tuple[int, ...] | None = None
    num_alike: int = 0
    window_start: int = 0
    from_host: bool = False

    @property
    def node(self) -> PrefixNode | None:
        return self.nodes[-1] if self.nodes else None

    @property
    def window_nodes(self) -> list[PrefixNode]:
        return self.nodes[self.window_start :]

    def blocks(self) -> list[int]:
        """Blocks that admission takes over, beginnings first."""
        return blocks_of(self.nodes, self.window_nodes)


NO_HIT = PrefixHit([], 0)


def blocks_of(nodes: Iterable[PrefixNode], window_nodes: Iterable[PrefixNode]) -> list[int]:
    """The blocks of `nodes` in groups that keep all tokens, and those of `window_nodes` in groups with a window."""
    blocks = [block for node in nodes for block in node.blocks]
    return blocks + [block for node in window_nodes for block in node.window_blocks]
