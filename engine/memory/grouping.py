"""Which layers of a model share blocks: what groups its KV cache is laid out in."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llmsched.engine.architecture.geometry import Geometry, LayerGroup
from llmsched.engine.kv.layout import KVLayout

#: Groups at most: each costs a block table, and a smaller one may save padding.
MAX_GROUPS = 16


class CacheLayout(NamedTuple):
    """`layout`, and the layers that share a block (in groups, those of any one of them: all cost the same).

    `reason` says why layers with a window keep all tokens, if there are such layers and they do.
    """

    layout: KVLayout
    group: tuple[LayerGroup, ...]
    reason: str | None = None

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """What a token takes in one group."""
        return sum(layers.cached_bytes_per_token(dtype_bytes) for layers in self.group)


def cache_layout(geometry: Geometry, block_size: int, longest: int | None) -> CacheLayout:
    """How a model's layers are cached; `longest` is the most tokens of a sequence, None if that is not known.

    Layers with a window have groups of their own where sequences can grow longer than what they keep, and the KV of all
    layers is of one shape, so that blocks are of one size.
    """
    caching = tuple(group for group in geometry.groups if group.kind != "state")
    full = [group for group in caching if group.kind != "window"]
    windowed = [group for group in caching if group.kind == "window"]
    one = KVLayout(block_size)
    if not windowed:
        return CacheLayout(one, caching)
    if not full and longest is None:
        return CacheLayout(one, caching, "the context length is not known")
    if len({(group.kv_heads, *group.kv_widths) for group in caching}) > 1:
        return CacheLayout(one, caching, "their KV is of another shape than that of the others")
    sizes = sum(group.layers for group in full), sum(group.layers for group in windowed)
    size = _group_size(*sizes)
    groups = [-(-count // size) for count in sizes]
    layout = KVLayout(block_size, groups[0], groups[1], max(group.window or 0 for group in windowed))
    if longest is not None and size * layout.num_blocks(longest) >= sum(sizes) * layout.width(longest):
        return CacheLayout(one, caching, f"it saves nothing in sequences of up to {longest:,} tokens")
    return CacheLayout(layout, (replace(windowed[0], layers=size),))


def _group_size(num_full: int, num_windowed: int) -> int:
    """Layers of one group: no more than MAX_GROUPS groups if there is a way, then the least padding."""
    if not num_full:
        return num_windowed

    def waste(size: int) -> tuple[int, int, int]:
        groups = -(-num_full // size) + -(-num_windowed // size)
        return max(MAX_GROUPS, groups), groups * size, groups

    return min(range(1, min(num_full, num_windowed) + 1), key=waste)
