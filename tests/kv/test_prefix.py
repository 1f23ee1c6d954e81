"""The prefix tree finds exactly what was written, and forgets without a trace."""

from __future__ import annotations

from llmsched.engine.kv.prefix import PrefixTree


def fill(tree: PrefixTree, tokens: list[int], blocks: list[int], salt: str = "") -> None:
    node = None
    for index, block in enumerate(blocks):
        node = tree.insert(node, tokens, index, salt, block)


def found(tree: PrefixTree, tokens: list[int], salt: str = "", limit: int = 99) -> list[int]:
    return [node.block for node in tree.match(tokens, salt, limit)]


def test_match_is_the_longest_prefix_of_whole_blocks() -> None:
    tree = PrefixTree(4)
    fill(tree, list(range(12)), [7, 5, 3])
    assert found(tree, list(range(12))) == [7, 5, 3]
    assert found(tree, list(range(11))) == [7, 5]
    assert found(tree, [0, 1, 2, 3, 9, 9, 9, 9]) == [7]
    assert found(tree, [9, 1, 2, 3]) == []
    assert found(tree, list(range(12)), limit=2) == [7, 5]
    assert found(tree, list(range(12)), salt="other") == []


def test_second_writer_gets_the_first_ones_node() -> None:
    tree = PrefixTree(2)
    first = tree.insert(None, [1, 2], 0, "", 4)
    assert tree.insert(None, [1, 2], 0, "", 9) is first
    assert len(tree) == 1


def test_match_stops_at_a_missing_block() -> None:
    tree = PrefixTree(2)
    fill(tree, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    tree.remove(2)
    tree.remove(1)
    assert found(tree, [1, 2, 3, 4, 5, 6]) == [0]


def test_salts_leave_nothing_behind() -> None:
    tree = PrefixTree(2)
    for i in range(100):
        fill(tree, [1, 2], [i], salt=f"tenant {i}")
    for i in range(100):
        tree.remove(i)
    assert len(tree) == 0
    assert not tree._roots
