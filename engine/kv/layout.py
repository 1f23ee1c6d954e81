"""Layout of KV in blocks: which layers share blocks, and how many blocks a sequence holds.

Layers are cached in groups. A block holds the KV of block_size tokens in all layers of one group. Full-attention groups
keep every block of a sequence. Sliding-window groups keep only the blocks that later tokens still attend to. All blocks
have the same size and come from one pool, as in vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from llmsched.engine.architecture.geometry import Geometry, LayerGroup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


#: Limit on the number of layer groups. Each group needs a block table, but smaller groups may need less padding.
MAX_GROUPS = 16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of KV: `full_groups` groups of full-attention layers and `window_groups` groups of sliding-window layers.

    In sliding-window layers, a token attends to the last `window` tokens, itself included. After c tokens of a sequence
    are computed, sliding-window groups keep the block of position c and the `num_behind` blocks before it.
    """

    block_size: int
    full_groups: int = 1
    window_groups: int = 0
    window: int = 0
    recurrent: bool = False  # True if sequences also have recurrent state, which is not in blocks

    @property
    def num_groups(self) -> int:
        return self.full_groups + self.window_groups

    @property
    def num_behind(self) -> int:
        """Number of whole blocks that a sliding-window group keeps before the block that is being filled."""
        return max(1, -(-(self.window - 1) // self.block_size))

    def first_kept(self, num_tokens: int) -> int:
        """Return the index of the first block that a sliding-window group keeps after `num_tokens` computed tokens."""
        return max(0, num_tokens // self.block_size - self.num_behind)

    def width(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens fill in one full-attention group, rounded up."""
        return -(-num_tokens // self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a sequence of `num_tokens` tokens holds between two steps, in all groups together."""
        width = self.width(num_tokens)
        return self.full_groups * width + self.window_groups * min(width, self.num_behind + 1)

    def room(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many tokens of KV a sequence of each length in `num_tokens` keeps at most, summed over groups."""
        windowed: npt.NDArray[np.int64] = num_tokens.clip(max=(self.num_behind + 1) * self.block_size)
        return self.full_groups * num_tokens + self.window_groups * windowed

    def longest(self, num_blocks: int) -> int:
        """Return the length in tokens of the longest sequence that fits in `num_blocks` blocks.

        Returns sys.maxsize if every length fits: if there are no groups, or only sliding-window groups and the blocks
        hold a window in each of them.
        """
        if not self.num_groups:
            return sys.maxsize
        window = self.num_behind + 1
        width = num_blocks // self.num_groups
        if self.window_groups and width >= window:
            if not self.full_groups:
                return sys.maxsize
            width = (num_blocks - self.window_groups * window) // self.full_groups
        return width * self.block_size


class LayerGrouping(NamedTuple):
    layout: KVLayout
    group: tuple[LayerGroup, ...]  # layers that share a block
    reason: str | None = None  # why sliding-window layers keep the KV of all tokens, if they do

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of one token's KV in one group."""
        return sum(layers.bytes_per_token(dtype_bytes) for layers in self.group)


def group_layers(geometry: Geometry, block_size: int, longest: int | None) -> LayerGrouping:
    """Group layers for caching. `longest` is the largest number of tokens in a sequence (None: unknown)."""
    caching = tuple(group for group in geometry.groups if group.kind != "state")
    full = [group for group in caching if group.kind != "window"]
    windowed = [group for group in caching if group.kind == "window"]
    one = KVLayout(block_size, full_groups=1 if caching else 0, recurrent=len(caching) < len(geometry.groups))
    if not windowed:
        return LayerGrouping(one, caching)
    if not full and longest is None:
        return LayerGrouping(one, caching, "the context length is not known")
    if one.recurrent:
        return LayerGrouping(one, caching, "the model has recurrent layers")
    if len({(group.kv_heads, *group.kv_widths) for group in caching}) > 1:
        return LayerGrouping(one, caching, "the KV of the model's layers differs in shape")
    sizes = sum(group.layers for group in full), sum(group.layers for group in windowed)
    size = sizes[1]
    if full:  # take the size with the least padding; prefer sizes that make at most MAX_GROUPS groups

        def waste(size: int) -> tuple[int, int, int]:
            groups = sum(-(-count // size) for count in sizes)
            return max(MAX_GROUPS, groups), groups * size, groups

        size = min(range(1, min(sizes) + 1), key=waste)
    groups = [-(-count // size) for count in sizes]
    layout = KVLayout(block_size, groups[0], groups[1], max(group.window or 0 for group in windowed))
    if longest is not None and size * layout.num_blocks(longest) >= sum(sizes) * layout.width(longest):
        return LayerGrouping(one, caching, f"it saves nothing in sequences of up to {longest:,} tokens")
    return LayerGrouping(layout, (replace(windowed[0], layers=size),))
