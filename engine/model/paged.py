"""What every model path shares: the paged KV cache and what attention must know of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple

import torch

from llmsched.kernels.dispatch import paged_attention, write_kv


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

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write a layer's new keys [T, kv_heads, D] and values [T, kv_heads, Dv], then attend with query [T, heads, D].

        Returns [T, heads, Dv]. All contiguous; the options are those of `kernels.reference.paged_attention`.
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write_kv(key, value, keys, values, self.slot_mapping)
        return paged_attention(
            query,
            keys,
            values,
            self.block_tables,
            self.cu_seqlens_q,
            self.context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
