"""The prefix tree finds exactly what was written, and forgets without a trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsched.engine.kv.prefix_tree import MAX_COMPARED, PrefixTree, encode, num_common_tokens

IDS = st.lists(st.sampled_from([0, 1, 255, 256, 257, 65536, 2**31 - 1]), max_size=20)


def fill(tree: PrefixTree, tokens: list[int], blocks: list[int], salt: str = "") -> None:
    node = None
    for index, block in enumerate(blocks):
        key = encode(tokens[index * tree.block_size : (index + 1) * tree.block_size])
        [node] = tree.insert(node, key, salt, [(block,)])


def found(tree: PrefixTree, tokens: list[int], salt: str = "", limit: int = 99) -> list[int]:
    return [node.blocks[0] for node in tree.match(encode(tokens), salt, min(limit, len(tokens) // tree.block_size))]


@given(IDS, IDS)
def test_common_tokens_are_counted_exactly(one: list[int], two: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert num_common_tokens(encode(one), encode(two)) == expected


def test_match_is_the_longest_prefix_of_whole_blocks() -> None:
    tree = PrefixTree(4)
    fill(tree, list(range(12)), [7, 5, 3])
    assert found(tree, list(range(12))) == [7, 5, 3]
    assert found(tree, list(range(11))) == [7, 5]
    assert found(tree, [0, 1, 2, 3, 9, 9, 9, 9]) == [7]
    assert found(tree, [9, 1, 2, 3]) == []
    assert found(tree, list(range(12)), limit=2) == [7, 5]
    assert found(tree, list(range(12)), salt="other") == []


def test_match_goes_on_where_another_ended() -> None:
    tree = PrefixTree(2)
    fill(tree, list(range(8)), [0, 1, 2, 3])
    first = tree.match(encode(range(8)), "", 2)
    assert [node.blocks[0] for node in tree.match(encode(range(8)), "", 4, 2, first[-1])] == [2, 3]


def test_second_writer_gets_the_first_ones_node() -> None:
    tree = PrefixTree(2)
    first = tree.insert(None, encode([1, 2]), "", [(4,)])
    assert tree.insert(None, encode([1, 2]), "", [(9,)]) == first
    assert len(tree) == 1


def test_match_stops_at_a_missing_block() -> None:
    tree = PrefixTree(2)
    fill(tree, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    tree.remove(2)
    tree.remove(1)
    assert found(tree, [1, 2, 3, 4, 5, 6]) == [0]


def test_a_block_never_goes_before_the_one_behind_it() -> None:
    tree = PrefixTree(2)
    fill(tree, [1, 2, 3, 4], [0, 1])
    with pytest.raises(AssertionError, match="before the blocks after it"):
        tree.remove(0)


def test_closest_child_shares_most_tokens() -> None:
    tree = PrefixTree(4)
    fill(tree, [1, 2, 9, 9], [0])
    fill(tree, [1, 2, 3, 9], [1])
    fill(tree, [1, 9, 9, 9], [2])
    for wanted, block, common in (
        ([1, 2, 3, 4], 1, 3),
        ([1, 2, 9, 9], 0, 4),
        ([1, 2, 9], 0, 3),
        ([1, 9], 2, 2),
        ([1], 2, 1),
    ):
        child, shared = tree.closest(None, "", encode(wanted))
        assert (child.blocks, shared) == ((block,), common), wanted
    assert tree.closest(None, "", encode([5, 2, 3, 4])) == (None, 0)
    assert tree.closest(None, "other", encode([1, 2, 3, 4])) == (None, 0)


def test_closest_compares_only_the_newest_children_but_always_finds_an_equal_one() -> None:
    tree = PrefixTree(2)
    for block in range(MAX_COMPARED + 1):
        fill(tree, [1, block], [block])
    assert tree.closest(None, "", encode([1, 0])) == (tree.match(encode([1, 0]), "", 1)[0], 2)
    tree.remove(MAX_COMPARED)
    fill(tree, [7, 7], [MAX_COMPARED])
    assert tree.closest(None, "", encode([1, 99]))[1] == 1
    for block in range(1, MAX_COMPARED):
        tree.remove(block)
        fill(tree, [7, block + 100], [block])
    assert tree.closest(None, "", encode([1, 99])) == (None, 0)


def test_path_hash_is_that_of_the_whole_path() -> None:
    tree = PrefixTree(2)
    fill(tree, [1, 2, 3, 4], [0, 1])
    fill(tree, [5, 6, 3, 4], [2, 3])
    fill(tree, [1, 2, 3, 4], [4, 5], salt="other")
    paths = [tree.match(encode(ids), salt, 2)[-1] for ids, salt in (([1, 2, 3, 4], ""), ([5, 6, 3, 4], ""))]
    paths.append(tree.match(encode([1, 2, 3, 4]), "other", 2)[-1])
    assert len({node.path_hash for node in paths}) == 3
    assert tree.path_hash(paths[0].parent, "", encode([3, 4])) == paths[0].path_hash
    before = paths[0].path_hash
    for block in (1, 0):
        tree.remove(block)
    fill(tree, [1, 2, 3, 4], [8, 9])
    assert tree.match(encode([1, 2, 3, 4]), "", 2)[-1].path_hash == before


def test_salts_leave_nothing_behind() -> None:
    tree = PrefixTree(2)
    for i in range(100):
        fill(tree, [1, 2], [i], salt=f"tenant {i}")
    assert tree.in_other_salt("mine", encode([1, 2]), 100)
    assert not tree.in_other_salt("mine", encode([2, 1]), 100)
    assert not tree.in_other_salt("tenant 99", encode([1, 2]), 1)
    for i in range(100):
        tree.remove(i)
    assert len(tree) == 0
    assert not tree._roots
