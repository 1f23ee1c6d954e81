"""Groups of layers that share blocks, and the blocks that a sequence holds."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from configs import published_config
from hypothesis import given
from hypothesis import strategies as st

from llmsched.engine.architecture.geometry import Geometry, LayerGroup, kv_geometry
from llmsched.engine.kv.layout import MAX_GROUPS, KVLayout, group_layers

BF16 = 2


def geometry(full: int, windowed: int, window: int = 128, heads: int = 8) -> Geometry:
    groups = (LayerGroup("full", full, 8, 64, 64), LayerGroup("window", windowed, heads, 64, 64, window))
    return Geometry(tuple(group for group in groups if group.layers), "exact", ())


@pytest.mark.parametrize(
    ("full", "windowed", "groups", "layers"),
    [
        (12, 12, (1, 1), 12),  # gpt-oss-20b
        (21, 21, (1, 1), 21),  # Gemma-2-9B
        (4, 22, (2, 11), 2),  # Gemma-3-1B: groups of four would be padded by two layers
        (5, 29, (1, 6), 5),  # Gemma-3-4B: padded by one layer
        (8, 40, (1, 5), 8),  # Gemma-3-12B
        (10, 52, (3, 13), 4),  # Gemma-3-27B: padded by two; groups of two would need none, but be 31
        (1, 1, (1, 1), 1),
        (1, 40, (1, 40), 1),  # no other way
        (24, 6, (4, 1), 6),
    ],
)
def test_groups_have_equally_many_layers_and_little_padding(
    full: int, windowed: int, groups: tuple[int, int], layers: int
) -> None:
    found = group_layers(geometry(full, windowed), 16, None)
    assert found.layout == KVLayout(16, *groups, 128)
    assert found.bytes_per_token(BF16) == layers * 2 * 8 * 64 * BF16
    assert found.reason is None


@given(st.integers(1, 60), st.integers(1, 60))
def test_every_layer_has_a_place(full: int, windowed: int) -> None:
    layout = group_layers(geometry(full, windowed), 16, None).layout
    size = group_layers(geometry(full, windowed), 16, None).group[0].layers
    assert layout.full_groups * size >= full > (layout.full_groups - 1) * size
    assert layout.window_groups * size >= windowed > (layout.window_groups - 1) * size
    assert layout.num_groups <= max(MAX_GROUPS, -(-max(full, windowed) // min(full, windowed)) + 1)


@pytest.mark.parametrize(
    ("model", "longest", "reason"),
    [
        (geometry(0, 32), None, "the context length is not known"),
        (geometry(0, 32), 100, "it saves nothing in sequences of up to 100 tokens"),
        (geometry(16, 16, heads=4), None, "the KV of the model's layers differs in shape"),
        (geometry(12, 12, window=4096), 4096, "it saves nothing in sequences of up to 4,096 tokens"),
        (geometry(12, 0), None, None),
        (geometry(12, 12, window=4096), 8192, None),
    ],
)
def test_all_layers_share_a_table_if_groups_are_impossible_or_save_nothing(
    model: Geometry, longest: int | None, reason: str | None
) -> None:
    found = group_layers(model, 16, longest)
    if reason is None:
        assert found.reason is None
        return
    assert found.layout == KVLayout(16)
    assert found.bytes_per_token(BF16) == model.bytes_per_token(BF16)
    assert reason in (found.reason or "")


def test_published_configs() -> None:
    def layout(name: str) -> KVLayout:
        return group_layers(kv_geometry(published_config(name)), 16, 8192).layout

    assert layout("openai--gpt-oss-20b") == KVLayout(16, 1, 1, 128)
    assert layout("meta-llama--Meta-Llama-3.1-8B") == KVLayout(16)
    assert layout("google--gemma-4-26B-A4B") == KVLayout(16), "its full layers have other heads"


def test_windows_alone_make_one_group() -> None:
    found = group_layers(geometry(0, 32, window=4096), 16, 32768)
    assert found.layout == KVLayout(16, 0, 1, 4096)
    assert found.bytes_per_token(BF16) == geometry(0, 32).bytes_per_token(BF16)
    assert found.layout.num_blocks(32768) == 257
    assert (found.layout.longest(257), found.layout.longest(256)) == (sys.maxsize, 256 * 16)


def test_the_widest_of_several_windows_is_kept() -> None:
    windows = (LayerGroup("window", 6, 8, 64, 64, window) for window in (128, 512, 256))
    model = Geometry((LayerGroup("full", 6, 8, 64, 64), *windows), "exact", ())
    assert group_layers(model, 16, None).layout == KVLayout(16, 1, 3, 512)


LAYOUTS = st.builds(KVLayout, st.integers(1, 32), st.integers(1, 3), st.integers(0, 5), st.integers(1, 200))


@given(LAYOUTS, st.integers(0, 500))
def test_windows_keep_what_the_next_token_attends_to(layout: KVLayout, num_tokens: int) -> None:
    first = layout.first_kept(num_tokens) * layout.block_size
    assert first <= max(0, num_tokens - layout.window + 1)
    assert first + (layout.num_behind + 1) * layout.block_size > num_tokens, "the next token has room"


@given(LAYOUTS, st.integers(1, 500))
def test_num_blocks_is_the_sum_over_groups(layout: KVLayout, num_tokens: int) -> None:
    width = -(-num_tokens // layout.block_size)
    kept = min(width, -(-max(1, layout.window - 1) // layout.block_size) + 1)
    assert layout.num_blocks(num_tokens) == layout.full_groups * width + layout.window_groups * kept
    whole = np.array([width * layout.block_size])
    assert layout.room(whole).tolist() == [layout.num_blocks(num_tokens) * layout.block_size]


@given(LAYOUTS, st.integers(0, 400))
def test_longest_is_the_longest_sequence_that_fits(layout: KVLayout, num_blocks: int) -> None:
    longest = layout.longest(num_blocks)
    assert layout.num_blocks(longest) <= num_blocks
    assert layout.num_blocks(longest + 1) > num_blocks
