"""What every model path shares: the paged KV cache and what attention must know of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from llmsched.engine.errors import ModelError
from llmsched.engine.kv.layout import KVLayout
from llmsched.kernels.dispatch import paged_attention, write_kv


class LayerShape(NamedTuple):
    """KV of one layer: heads, and the width of a key and of a value (they may differ).

    A layer with a `window` sees the last so many tokens, the query's own included; None: all.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


class Place(NamedTuple):
    """Where a layer's KV is: in the blocks of `group`, and of a block in the part `slot`."""

    group: int
    slot: int


def place_layers(layers: ListLike[LayerShape], layout: KVLayout) -> list[Place]:
    """A place for each layer: those whose window is within the layout's share the groups that have one.

    Raises ModelError if layers of different shapes would share memory, or one keeps all tokens and no group does.
    """
    windowed = [bool(layout.window_groups and layer.window and layer.window <= layout.window) for layer in layers]
    if not layout.full_groups and not all(windowed):
        raise ModelError(f"layer {windowed.index(False)} sees all tokens, but the cache is laid out for windows alone")
    counts = {True: layout.window_groups, False: layout.full_groups}
    size = max(-(-windowed.count(kind) // count) for kind, count in counts.items() if count)
    before, places = {True: layout.full_groups * size, False: 0}, []
    for kind in windowed:
        places.append(Place(*divmod(before[kind], size)))
        before[kind] += 1
    kv: dict[int, LayerShape] = {}
    for layer, place in zip(layers, places, strict=True):
        if kv.setdefault(place.slot, layer)[:3] != layer[:3]:
            raise ModelError(f"layers with KV of {kv[place.slot][:3]} and {layer[:3]} cannot share blocks")
    return places


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per slot of a block [num_blocks, kv_heads, block_size, key_dim] of keys and [..., value_dim] of values.

    A block belongs to one group of layers at a time; `places` say which layer is where. Starts as zeros: a kernel may
    multiply a masked position's value by a weight of 0, and 0 x NaN would be NaN.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    places: list[Place]

    @classmethod
    def allocate(
        cls,
        layers: ListLike[LayerShape],
        num_blocks: int,
        layout: KVLayout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """A cache of `num_blocks` blocks for these layers. Raises ModelError if the layout does not fit them."""

        def zeros(layer: LayerShape, width: int) -> torch.Tensor:
            return torch.zeros(num_blocks, layer.kv_heads, layout.block_size, width, dtype=dtype, device=device)

        places = place_layers(layers, layout)
        slots = {place.slot: layer for layer, place in zip(layers, places, strict=True)}
        shapes = [slots[slot] for slot in range(len(slots))]
        keys, values = [zeros(s, s.key_dim) for s in shapes], [zeros(s, s.value_dim) for s in shapes]
        return cls(keys, values, places)

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keys, values and group of a layer."""
        group, slot = self.places[layer]
        return self.keys[slot], self.values[slot], group

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole blocks (int64 [N] ids each), every slot. All are read before any is written."""
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
        keys, values, group = self.cache.of_layer(layer)
        write_kv(key, value, keys, values, self.slot_mapping[group])
        return paged_attention(
            query,
            keys,
            values,
            self.block_tables[group],
            self.cu_seqlens_q,
            self.context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )


class PagedModel(Protocol):
    """A model over the paged cache. `layers` are its KV shapes, `vocab_size` is the width of the logits."""

    layers: list[LayerShape]
    vocab_size: int

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PagedContext, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute input_ids [T] at positions [T], write their KV, return logits [R, vocab_size] in the model's dtype.

        `logit_rows` [R] are the tokens whose logits are needed; None stands for all T of them.
        """
        ...
