"""How the KV of a sequence lies in blocks: layers in groups, each group with blocks of its own.

Layers that see all tokens keep every block. Layers with a sliding window keep what later tokens will see, so a sequence
holds no more of them than a window's worth, however long it grows. All blocks are of one size and in one pool: a
block holds block_size tokens of the layers of one group, whichever that is now. (vLLM's hybrid cache groups layers
so, too.)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from llmsched.engine.architecture.geometry import Geometry, LayerGroup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


#: Groups at most: each costs a block table, and a smaller one may save padding.
MAX_GROUPS = 16


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`full_groups` groups of layers that keep all tokens, `window_groups` that see the last `window`, the token itself
    included.

    When a sequence has c tokens, the latter keep the block that token c goes to and the `num_behind` blocks in front of
    it; those before are given back. (One block in front is always kept, so that what was found stays held.)
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
        """Whole blocks that a group with a window keeps in front of the one that is being filled."""
        return max(1, -(-(self.window - 1) // self.block_size))

    def first_kept(self, num_tokens: int) -> int:
        """The first block that a group with a window keeps of a sequence whose first `num_tokens` are computed."""
        return max(0, num_tokens // self.block_size - self.num_behind)

    def width(self, num_tokens: int) -> int:
        """Blocks of one group that keeps all of `num_tokens` tokens: ceil(num_tokens / block_size)."""
        return -(-num_tokens // self.block_size)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of all groups that a sequence of `num_tokens` tokens holds between two steps."""
        width = self.width(num_tokens)
        return self.full_groups * width + self.window_groups * min(width, self.num_behind + 1)

    def room(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens that the blocks have room for which sequences of so many tokens hold, all groups together."""
        windowed: npt.NDArray[np.int64] = num_tokens.clip(max=(self.num_behind + 1) * self.block_size)
        return self.full_groups * num_tokens + self.window_groups * windowed

    def longest(self, num_blocks: int) -> int:
        """The most tokens of one sequence that so many blocks hold; sys.maxsize where windows alone set no limit."""
        window = self.num_behind + 1
        width = num_blocks // self.num_groups
        if self.window_groups and width >= window:
            if not self.full_groups:
                return sys.maxsize
            width = (num_blocks - self.window_groups * window) // self.full_groups
        return width * self.block_size


class LayerGrouping(NamedTuple):
    """`layout`, and the layers that share a block (in groups, those of any one of them: all cost the same).

    `reason` says why layers with a window keep all tokens, if there are such layers and they do.
    """

    layout: KVLayout
    group: tuple[LayerGroup, ...]
    reason: str | None = None

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """What a token takes in one group."""
        return sum(layers.cached_bytes_per_token(dtype_bytes) for layers in self.group)


def group_layers(geometry: Geometry, block_size: int, longest: int | None) -> LayerGrouping:
    """How a model's layers are cached; `longest` is the most tokens of a sequence, None if that is not known.

    Layers with a window have groups of their own where sequences can grow longer than what they keep, and the KV of all
    layers is of one shape, so that blocks are of one size.
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
    size = _group_size(*sizes)
    groups = [-(-count // size) for count in sizes]
    layout = KVLayout(block_size, groups[0], groups[1], max(group.window or 0 for group in windowed))
    if longest is not None and size * layout.num_blocks(longest) >= sum(sizes) * layout.width(longest):
        return LayerGrouping(one, caching, f"it saves nothing in sequences of up to {longest:,} tokens")
    return LayerGrouping(layout, (replace(windowed[0], layers=size),))


def _group_size(num_full: int, num_windowed: int) -> int:
    """Layers of one group: no more than MAX_GROUPS groups if there is a way, then the least padding."""
    if not num_full:
        return num_windowed

    def waste(size: int) -> tuple[int, int, int]:
        groups = -(-num_full // size) + -(-num_windowed // size)
        return max(MAX_GROUPS, groups), groups * size, groups

    return min(range(1, min(num_full, num_windowed) + 1), key=waste)
