"""The prefix tree: which blocks hold the KV of a given beginning of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

BlockKey = tuple[int, ...]
NO_BLOCK = -1


class PrefixNode:
    """One cached block: `key` are its tokens, the path from the root is the whole prefix.

    The children are found by their tokens themselves: the dictionary hashes to filter and compares to decide, so two
    prefixes are equal only if every token is.
    """

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, key: BlockKey, block: int, parent: PrefixNode | None) -> None:
        self.key = key
        self.block = block
        self.parent = parent
        self.children: dict[BlockKey, PrefixNode] = {}


class PrefixTree:
    """Tree over token ids at block granularity, one root per cache salt.

    Invariants: a node's block holds the written KV of its tokens after those of its ancestors; a block has at most one
    node; a node is removed only when it has no children (the pool evicts ends before beginnings).
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, PrefixNode] = {}
        self._node_of_block: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._node_of_block)

    def match(self, token_ids: Sequence[int], salt: str, max_blocks: int) -> list[PrefixNode]:
        """The nodes of the longest known prefix, at most `max_blocks` of them; stops at the first that is missing."""
        node = self._roots.get(salt)
        path: list[PrefixNode] = []
        while node is not None and len(path) < max_blocks:
            node = node.children.get(self._key(token_ids, len(path)))
            if node is not None:
                path.append(node)
        return path

    def insert(
        self, parent: PrefixNode | None, token_ids: Sequence[int], index: int, salt: str, block: int
    ) -> PrefixNode:
        """Make block number `index` of a sequence findable below `parent` (None: the salt's root).

        Returns the node of these tokens: a new one for `block`, or the one that another sequence has put there before.
        """
        if parent is None:
            parent = self._roots.setdefault(salt, PrefixNode((), NO_BLOCK, None))
        key = self._key(token_ids, index)
        node = parent.children.get(key)
        if node is None:
            node = PrefixNode(key, block, parent)
            parent.children[key] = node
            self._node_of_block[block] = node
        return node

    def remove(self, block: int) -> None:
        """Forget a block that the pool evicts."""
        node = self._node_of_block.pop(block)
        assert not node.children, f"block {block} evicted before the blocks behind it"
        assert node.parent is not None
        del node.parent.children[node.key]
        if node.parent.block == NO_BLOCK and not node.parent.children:
            self._drop_root(node.parent)

    def _drop_root(self, root: PrefixNode) -> None:
        """Tenants come and go: a salt without blocks leaves nothing behind."""
        salt = next(salt for salt, known in self._roots.items() if known is root)
        del self._roots[salt]

    def _key(self, token_ids: Sequence[int], index: int) -> BlockKey:
        start = index * self.block_size
        return tuple(token_ids[start : start + self.block_size])
