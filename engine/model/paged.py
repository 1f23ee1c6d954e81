"""What every model path shares: the paged KV cache and what attention must know of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple

import torch


class LayerShape(NamedTuple):
    """KV of one layer: heads, and the width of a key and of a value (they may differ)."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer [num_blocks, kv_heads, block_size, key_dim] of keys and [..., value_dim] of values.

    Starts as zeros: a kernel may multiply a masked position's value by a weight of 0, and 0 x NaN would be NaN.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def allocate(
        cls, layers: ListLike[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        def zeros(layer: LayerShape, width: int) -> torch.Tensor:
            return torch.zeros(num_blocks, layer.kv_heads, block_size, width, dtype=dtype, device=device)

        return cls(
            [zeros(layer, layer.key_dim) for layer in layers], [zeros(layer, layer.value_dim) for layer in layers]
        )

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole blocks (int64 [N] ids each) in every layer. All are read before any is written."""
        for tensor in (*self.keys, *self.values):
            tensor[destinations] = tensor[sources]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Where a packed batch stands in the cache: arrays of `executor.batch.PackedBatch`, on the device."""

    cache: KVCache
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
