"""Layout of KV in blocks: which layers share blocks, and how many blocks a sequence holds.

Layers are cached in groups, and a block holds block_size tokens of the layers of one group. Full-attention groups keep
every block of a sequence. Sliding-window groups keep only the blocks that later tokens still see. All blocks have the
same size and come from one pool, as in vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from llmsched.engine.architecture.geometry import Geometry, LayerGroup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


#: Most groups of layers. Each group costs a block table; smaller groups may save padding.
MAX_GROUPS = 16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Numbers of groups: `full_groups` with full attention, `window_groups` that attend to the last `window` tokens,
    the token itself included.

    Of a sequence with c computed tokens, window groups keep the block that token c goes to and the `num_behind` blocks
    in front of it, and release the others. (One block in front is always kept, so that found nodes stay held.)
    """

    block_size: int
    full_groups: int = 1
    window_groups: int = 0
    window: int = 0

    @property
    def num_groups(self) -> int:
        return self.full_groups + self.window_groups

    @property
    def num_behind(self) -> int:
        """Whole blocks that a window group keeps in front of the one being filled."""
        return max(1, -(-(self.window - 1) // self.block_size))

    def first_kept(self, num_tokens: int) -> int:
        """Return the first block index that a window group keeps of a sequence with `num_tokens` computed tokens."""
        return max(0, num_tokens // self.block_size - self.num_behind)

    def width(self, num_tokens: int) -> int:
        """Return the blocks of one full-attention group for `num_tokens` tokens: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of all groups that a sequence of `num_tokens` tokens holds between two steps."""
        width = self.width(num_tokens)
        return self.full_groups * width + self.window_groups * min(width, self.num_behind + 1)

    def room(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the tokens, summed over groups, that sequences of `num_tokens` tokens hold in blocks."""
        windowed: npt.NDArray[np.int64] = num_tokens.clip(max=(self.num_behind + 1) * self.block_size)
        return self.full_groups * num_tokens + self.window_groups * windowed

    def longest(self, num_blocks: int) -> int:
        """Return the most tokens of one sequence that fit; sys.maxsize if window groups alone fit and set no limit."""
        window = self.num_behind + 1
        width = num_blocks // self.num_groups
        if self.window_groups and width >= window:
            if not self.full_groups:
                return sys.maxsize
            width = (num_blocks - self.window_groups * window) // self.full_groups
        return width * self.block_size


class LayerGrouping(NamedTuple):
    """Result of `group_layers`: the layout, and the layers of one group (all groups cost the same).

    `reason` says why layers with a sliding window keep all tokens nevertheless; None if they do not.
    """

    layout: KVLayout
    group: tuple[LayerGroup, ...]
    reason: str | None = None

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes that a token takes in one group."""
        return sum(layers.cached_bytes_per_token(dtype_bytes) for layers in self.group)


def group_layers(geometry: Geometry, block_size: int, longest: int | None) -> LayerGrouping:
    """Return how a model's layers are cached, for sequences of at most `longest` tokens (None: unknown).

    Sliding-window layers get groups of their own only if that saves blocks and the KV of all layers has one shape, so
    that all blocks have one size.
    """
    caching = tuple(group for group in geometry.groups if group.kind != "state")
    full = [group for group in caching if group.kind != "window"]
    windowed = [group for group in caching if group.kind == "window"]
    one = KVLayout(block_size)
    if not windowed:
        return LayerGrouping(one, caching)
    if not full and longest is None:
        return LayerGrouping(one, caching, "the context length is not known")
    if len({(group.kv_heads, *group.kv_widths) for group in caching}) > 1:
        return LayerGrouping(one, caching, "their KV is of another shape than that of the others")
    sizes = sum(group.layers for group in full), sum(group.layers for group in windowed)
    size = sizes[1]
    if full:  # the least padding, among sizes that give at most MAX_GROUPS groups if any do

        def waste(size: int) -> tuple[int, int, int]:
            groups = sum(-(-count // size) for count in sizes)
            return max(MAX_GROUPS, groups), groups * size, groups

        size = min(range(1, min(sizes) + 1), key=waste)
    groups = [-(-count // size) for count in sizes]
    layout = KVLayout(block_size, groups[0], groups[1], max(group.window or 0 for group in windowed))
    if longest is not None and size * layout.num_blocks(longest) >= sum(sizes) * layout.width(longest):
        return LayerGrouping(one, caching, f"it saves nothing in sequences of up to {longest:,} tokens")
    return LayerGrouping(layout, (replace(windowed[0], layers=size),))
