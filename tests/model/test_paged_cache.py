"""Places of layers in the KV cache: groups of layers share blocks."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from llmsched.engine.errors import ModelError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.model.paged_cache import KVCache, LayerShape, host_zeros, place_layers, take_memory

FULL, WINDOW = LayerShape(2, 6, 4), LayerShape(2, 6, 4, 8)


def test_one_group_has_a_part_for_each_layer() -> None:
    assert place_layers([FULL, WINDOW, LayerShape(1, 8, 8)], KVLayout(4)) == [(0, 0), (0, 1), (0, 2)]


def test_window_layers_share_parts_with_the_others() -> None:
    layers = [WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL, WINDOW]
    places = place_layers(layers, KVLayout(4, 1, 3, 8))
    assert places == [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1), (3, 0)]
    cache = KVCache.allocate(layers, 10, KVLayout(4, 1, 3, 8), torch.float32, torch.device("cpu"))
    assert cache.num_bytes == 10 * 2 * 2 * 4 * (6 + 4) * 4
    assert [cache.of_layer(layer)[2] for layer in range(7)] == [1, 1, 0, 2, 2, 0, 3]
    assert cache.of_layer(1)[0] is cache.of_layer(5)[0]


def test_a_window_that_is_larger_than_the_layouts_keeps_all_tokens() -> None:
    layers = [FULL, LayerShape(2, 6, 4, 9), WINDOW]
    assert [group for group, _ in place_layers(layers, KVLayout(4, 1, 1, 8))] == [0, 0, 1]


def test_a_layer_that_sees_all_tokens_needs_a_full_group() -> None:
    assert place_layers([WINDOW, WINDOW], KVLayout(4, 0, 1, 8)) == [(0, 0), (0, 1)]
    with pytest.raises(ModelError, match="layer 1 sees all tokens, but the cache has only sliding-window groups"):
        place_layers([WINDOW, FULL], KVLayout(4, 0, 1, 8))


def test_layers_of_different_shapes_cannot_share_blocks() -> None:
    with pytest.raises(ModelError, match=r"layers with KV of \(2, 6, 4\) and \(1, 8, 8\) cannot share blocks"):
        place_layers([FULL, LayerShape(1, 8, 8, 8)], KVLayout(4, 1, 1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_in_host_memory(dtype: torch.dtype) -> None:
    tensor = host_zeros((3, 5, 7), dtype)
    assert (tensor.shape, tensor.dtype, tensor.data_ptr() % 4096) == ((3, 5, 7), dtype, 0)
    assert torch.equal(tensor, torch.zeros(3, 5, 7, dtype=dtype))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such call")
def test_pages_are_taken_in_the_background() -> None:
    """Clearing 4 GiB took 1.5 s of every start."""

    def page_faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = page_faults()
    tensor = host_zeros((64 << 20,), torch.uint8)
    assert page_faults() - before < 50
    tensor[:] = 1
    tensor = host_zeros((64 << 20,), torch.uint8)
    tensor[12345] = 7
    take_memory([tensor])
    assert tensor[12345] == 7
    before = page_faults()
    assert tensor.count_nonzero() == 1
    assert page_faults() - before < 50


def test_memory_that_the_system_refuses() -> None:
    with pytest.raises(MemoryError):
        host_zeros((1 << 62,), torch.uint8)
