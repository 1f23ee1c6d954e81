"""Work lists of the Triton kernels: all work is listed once, in equal shares, in arrays of sizes known beforehand."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsched.kernels.triton.tiling import Gpu, Item, Join, WorkList, list_work, work_units

H200_PROCESSORS, KV_HEADS = 132, 8


def listed(sequences: list[tuple[int, int]], *, kv_heads: int = KV_HEADS, **options: Any) -> WorkList:
    """List the work of sequences (q_len, context) on a GPU with 132 multiprocessors."""
    bounds = np.cumsum([0] + [q_len for q_len, _ in sequences]).astype(np.int32)
    contexts = np.array([context for _, context in sequences], np.int32)
    defaults = {"tile_queries": 1, "block_n": 64, "window": None, "fixed": True}
    units = work_units(Gpu(H200_PROCESSORS, 90), kv_heads)
    return list_work(bounds, contexts, np.arange(len(contexts)), **{**defaults, "units": units, **options})


def item_keys(work: WorkList) -> Any:
    return (work.items[:, Item.END] - work.items[:, Item.BEGIN])[work.items[:, Item.NUM_QUERIES] > 0]


@settings(deadline=None)
@given(
    sequences=st.lists(
        st.integers(1, 40_000).flatmap(lambda c: st.tuples(st.integers(1, min(c, 300)), st.just(c))),
        min_size=1,
        max_size=40,
    ),
    tile_queries=st.sampled_from([1, 4, 32, 128]),
    block_n=st.sampled_from([16, 64]),
    window=st.none() | st.integers(1, 5000),
    units=st.integers(1, 300),
)
def test_every_key_of_every_query_is_visited_once(
    sequences: list[tuple[int, int]], tile_queries: int, block_n: int, window: int | None, units: int
) -> None:
    options = {"tile_queries": tile_queries, "block_n": block_n, "window": window, "units": units}
    work = listed(sequences, **options, fixed=False)
    first_tokens = np.cumsum([0] + [q_len for q_len, _ in sequences])
    tiles: dict[int, list[Any]] = {}
    for item in work.items.tolist():
        tiles.setdefault(item[Item.FIRST_TOKEN], []).append(item)
    expected_joins, slots, next_token = [], [], 0
    for token, items in sorted(tiles.items()):
        items.sort(key=lambda item: item[Item.BEGIN])
        table, _, queries, position = items[0][:4]
        assert token == next_token
        assert token - first_tokens[table] == position - (sequences[table][1] - sequences[table][0])
        assert 1 <= queries <= min(tile_queries, work.tile_queries)
        next_token += queries
        assert all(item[: Item.BEGIN] == items[0][: Item.BEGIN] for item in items)
        edges = [item[Item.BEGIN] for item in items] + [position + queries]
        assert edges[0] == (max(0, position - window + 1) if window else 0)
        assert [item[Item.END] for item in items] == edges[1:]
        assert all(low < high for low, high in itertools.pairwise(edges))
        assert [item[Item.IS_FIRST] for item in items] == [1] + [0] * (len(items) - 1)
        if len(items) > 1:
            used = [item[Item.SLOT] for item in items]
            assert used == list(range(used[0], used[0] + len(items)))
            expected_joins.append([token, queries, used[0], len(items)])
            slots += used
        else:
            assert items[0][Item.SLOT] == -1
    assert next_token == first_tokens[-1]
    assert sorted(work.joins.tolist()) == expected_joins
    assert sorted(slots) == list(range(work.num_slots))

    padded = listed(sequences, **options)
    assert np.array_equal(padded.items[: len(work.items)], work.items)
    assert np.array_equal(padded.joins[: len(work.joins)], work.joins)
    assert not padded.items[len(work.items) :, Item.NUM_QUERIES].any()
    assert not padded.joins[len(work.joins) :, Join.NUM_QUERIES].any()
    assert padded.num_slots >= work.num_slots


@given(st.data())
def test_the_lengths_of_decodes_change_no_shape(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 256))
    contexts = st.lists(st.integers(1, 131_072), min_size=rows, max_size=rows)
    one, other = (listed([(1, context) for context in data.draw(contexts)]) for _ in range(2))
    assert one.items.shape == other.items.shape == (rows + 33, len(Item))
    assert one.joins.shape == other.joins.shape == (16, len(Join))
    assert one[2:] == other[2:] == (33, 1)


def busiest_processor(keys: Any, kv_heads: int) -> float:
    """Return the keys of the busiest multiprocessor, relative to the mean, if each takes the next item when it is idle.

    The programs of all KV heads of an item come one after the other.
    """
    loads = [0] * H200_PROCESSORS
    for count in np.repeat(keys, kv_heads).tolist():
        heapq.heapreplace(loads, loads[0] + count)
    return float(max(loads) / np.mean(loads))


@pytest.mark.parametrize(
    ("contexts", "bound"),
    [
        pytest.param([32_768] + [512] * 31, 1.2, id="one 32k among 31 short"),
        pytest.param([1024] * 31 + [131_072], 1.2, id="one 128k among 31 of 1k"),
        pytest.param([32_768], 1.1, id="one 32k"),
        pytest.param([1024] * 64, 1.1, id="64 of 1k"),
        pytest.param(list(range(100, 8100, 100)), 1.1, id="80 of 100 to 8,000"),
    ],
)
def test_processors_get_equal_shares(contexts: list[int], bound: float) -> None:
    """Without splits, the first case takes 11 times the mean."""
    keys = item_keys(listed([(1, context) for context in contexts]))
    assert keys.sum() == sum(contexts)
    assert list(keys) == sorted(keys, reverse=True)
    assert busiest_processor(keys, KV_HEADS) < bound
    assert keys.max() <= sum(contexts) * KV_HEADS / H200_PROCESSORS + 64


def test_a_full_gpu_needs_no_splits() -> None:
    assert len(item_keys(listed([(1, 1000 + row) for row in range(64)]))) == 64
    assert len(item_keys(listed([(2048, 2048)], tile_queries=32))) == 64


def test_short_contexts_are_not_split() -> None:
    assert len(item_keys(listed([(1, 300)]))) == 1
    assert len(item_keys(listed([(1, 1024)]))) == 4
    assert len(item_keys(listed([(1, 32_768)], window=256))) == 1
