"""The summary of a cache names exactly the prefixes that the cache has, whatever happens to it."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_driver import KVDriver

from llmsched.engine.kv.cache_summary import CacheSummary, prefix_hashes, span_of
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.prefix_tree import PrefixNode, PrefixTree, encode
from llmsched.engine.routing.rules import RoutedPrompt, num_cached

EVERY = 2
BLOCK = 2
SPAN = EVERY * BLOCK


def summarised(max_hashes: int = 100) -> tuple[PrefixTree, CacheSummary]:
    tree = PrefixTree(BLOCK)
    tree.observer = summary = CacheSummary(KVLayout(BLOCK), SPAN, max_hashes)
    return tree, summary


def fill(tree: PrefixTree, tokens: list[int], first_block: int, salt: str = "") -> None:
    node: PrefixNode | None = None
    for index in range(len(tokens) // BLOCK):
        key = encode(tokens[index * BLOCK : (index + 1) * BLOCK])
        [node] = tree.insert(node, key, salt, [(first_block + index,)])


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    return prefix_hashes(encode([*tokens, 0]), salt, SPAN)


def test_a_cached_prompt_has_the_hashes_of_its_prefixes() -> None:
    tree, summary = summarised()
    fill(tree, list(range(11)), 0)
    assert summary.hashes() == set(hashes_of(list(range(8))))
    assert len(summary.hashes()) == 2


def test_the_last_token_of_a_prompt_is_in_no_prefix() -> None:
    assert len(prefix_hashes(encode(range(8)), "", SPAN)) == 1
    assert len(prefix_hashes(encode(range(9)), "", SPAN)) == 2
    assert prefix_hashes(encode(range(4)), "", SPAN) == []


def test_salts_have_hashes_of_their_own() -> None:
    tree, summary = summarised()
    fill(tree, list(range(4)), 0, "a")
    assert summary.hashes() == set(hashes_of(list(range(4)), "a"))
    assert summary.hashes().isdisjoint(hashes_of(list(range(4)), "b"))


def test_the_same_object_is_published_until_the_cache_changes() -> None:
    tree, summary = summarised()
    fill(tree, list(range(4)), 0)
    first = summary.hashes()
    fill(tree, list(range(6)), 0)  # one more block is no whole span
    assert summary.hashes() is first
    tree.remove(2)
    tree.remove(1)
    assert summary.hashes() == set()


def test_a_full_summary_leaves_out_the_oldest_of_equally_long_prefixes() -> None:
    tree, summary = summarised(max_hashes=2)
    fill(tree, [0, 1, 2, 3], 0)
    fill(tree, [4, 5, 6, 7], 10)
    fill(tree, [8, 9, 8, 9], 20)
    assert summary.hashes() == {*hashes_of([4, 5, 6, 7]), *hashes_of([8, 9, 8, 9])}
    fill(tree, [0, 1, 2, 3, 4, 5, 6, 7], 0)  # extends a dropped prefix
    assert len(summary.hashes()) == 2


def test_a_full_summary_keeps_the_prefix_that_all_prompts_share() -> None:
    tree, summary = summarised(max_hashes=2)
    system = [0, 1, 2, 3]
    for number in range(4):
        fill(tree, [*system, *range(10 * number + 10, 10 * number + 14)], 10 * number)
    assert set(hashes_of(system)) < summary.hashes()
    assert set(hashes_of([*system, *range(40, 44)])) == summary.hashes()
    tree.remove(33)
    tree.remove(32)
    assert set(hashes_of([*system, *range(30, 34)])) == summary.hashes(), "an eviction makes room"


def test_hashes_are_the_same_in_every_process() -> None:
    code = "from llmsched.engine.kv.cache_summary import prefix_hashes as p; print(p(bytes(100), 'salt', 4)[-1].hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == prefix_hashes(bytes(100), "salt", 4)[-1].hex()


def test_the_span_is_whole_blocks() -> None:
    assert [span_of(size) for size in (1, 16, 100, 256, 512)] == [256, 256, 200, 256, 512]


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=14), st.booleans()), max_size=12))
def test_insertions_and_evictions_leave_the_hashes_of_what_is_cached(
    steps: list[tuple[list[int], bool]],
) -> None:
    tree, summary = summarised()
    inserted: list[list[int]] = []
    for number, (tokens, evict) in enumerate(steps):
        fill(tree, tokens, 100 * number)
        inserted.append(tokens)
        if evict:
            leaves = [node for node in set(tree._node_of_block.values()) if not node.children]
            if leaves:
                tree.remove(leaves[0].blocks[0])
    expected = set()
    for tokens in inserted:
        cached = len(tree.match(encode(tokens), "", len(tokens) // BLOCK)) * BLOCK
        expected.update(hashes_of(tokens[: cached // SPAN * SPAN]))
    assert summary.hashes() == expected


@pytest.mark.parametrize(
    "layout", [KVLayout(BLOCK), KVLayout(BLOCK, 1, 1, 7), KVLayout(BLOCK, 0, 2, 5), KVLayout(BLOCK, recurrent=True)]
)
def test_a_summary_counts_what_a_request_would_find(layout: KVLayout) -> None:
    """A prefix that lacks sliding-window blocks or a recurrent state is not counted."""
    random = Random(0)
    driver = KVDriver(40 * layout.num_groups, BLOCK, layout=layout)
    driver.kv.prefix_cache.tree.observer = summary = CacheSummary(layout, SPAN, states=driver.kv.states)
    texts = [[number, *(random.randrange(100) for _ in range(60))] for number in range(8)]
    gaps = []
    for _ in range(120):
        text = random.choice(texts)
        driver.serve(text[: random.randint(1, 60)])
        prompt = [*random.choice(texts), 0]
        lengths = RoutedPrompt(len(prompt), prefix_hashes(encode(prompt), "", SPAN), SPAN).lengths()
        gaps.append(driver.find(prompt) - num_cached(lengths, summary.hashes()))
    assert min(gaps) >= 0
    assert sum(gap < 2 * SPAN for gap in gaps) > 100
