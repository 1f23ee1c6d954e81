"""Paged KV cache, and attention over this cache for a packed batch."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, Unpack

import numpy as np
import torch

from llmsched.engine.errors import ModelError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.recurrent_state import StatePiece
from llmsched.engine.model.recurrent_layers import LayerState, StateTensors, StepStates
from llmsched.kernels.dispatch import latent_attention, paged_attention, prepare_attention, write_kv
from llmsched.kernels.fp8 import as_bytes
from llmsched.kernels.reference import AttentionOptions, AttentionShape, Put

#: Advice of madvise(2), Linux 5.14 or newer: take the memory of these pages now, without a change of their contents.
_MADV_POPULATE_WRITE = 23
#: Bytes per call of madvise. During a call, no other thread can allocate large tensors.
_POPULATED_BYTES = 2 << 20


class LayerShape(NamedTuple):
    """Shape of one layer's KV.

    In latent attention, keys are latent vectors, and values are rotary keys (see kernels/latents.py).
    """

    kv_heads: int
    key_dim: int  # width of one head's key
    value_dim: int  # width of one head's value
    window: int | None = None  # sliding window in tokens, which includes the query's own token
    source: int | None = None  # the earlier layer whose KV this layer reads; None: the layer has its own


class LayerPlace(NamedTuple):
    group: int  # index of the layer's group
    part: int  # index of the layer within its group


def place_layers(layers: ListLike[LayerShape], layout: KVLayout) -> list[LayerPlace]:
    """Assign each layer to a layer group of `layout`.

    Return one place per layer. A layer that reads another layer's KV has the place of that layer. Raises ModelError if
    layers with different KV shapes would share blocks, or if no group suits a layer.
    """
    own = [layer for layer in layers if layer.source is None]
    windowed = [bool(layout.window_groups and layer.window and layer.window <= layout.window) for layer in own]
    if not layout.full_groups and not all(windowed):
        raise ModelError(f"layer {windowed.index(False)} sees all tokens, but the cache has only sliding-window groups")
    counts = {True: layout.window_groups, False: layout.full_groups}
    size = max((-(-windowed.count(kind) // count) for kind, count in counts.items() if count), default=0)
    before = {True: layout.full_groups * size, False: 0}
    places, kinds = list[LayerPlace](), iter(windowed)
    for layer in layers:
        if layer.source is not None:
            places.append(places[layer.source])
            continue
        kind = next(kinds)
        places.append(LayerPlace(*divmod(before[kind], size)))
        before[kind] += 1
    kv: dict[int, LayerShape] = {}
    for layer, place in zip(layers, places, strict=True):
        if kv.setdefault(place.part, layer)[:3] != layer[:3]:
            raise ModelError(f"layers with KV of {kv[place.part][:3]} and {layer[:3]} cannot share blocks")
    return places


@dataclass(frozen=True, slots=True)
class KVCache:
    """Tensors with the KV of all blocks."""

    #: Layers with the same part in different groups share tensors, but not blocks.
    keys: list[torch.Tensor]  # for each part [num_blocks, kv_heads, block_size, key_dim]
    values: list[torch.Tensor]  # for each part [num_blocks, kv_heads, block_size, value_dim]
    places: list[LayerPlace]  # group and part of each layer
    scales: ListLike[torch.Tensor] | None = None  # of each layer in an fp8 cache, [2, kv_heads]
    writers: frozenset[int] = frozenset()  # layers that write KV; other layers only read that of an earlier one

    @classmethod
    def allocate(
        cls,
        layers: ListLike[LayerShape],
        num_blocks: int,
        layout: KVLayout,
        dtype: torch.dtype,
        device: torch.device,
        scales: ListLike[torch.Tensor] | None = None,
    ) -> KVCache:
        """Allocate a cache of `num_blocks` blocks. Raises ModelError if `layout` does not suit the layers."""

        def zeros(layer: LayerShape, width: int) -> torch.Tensor:
            shape = (num_blocks, layer.kv_heads, layout.block_size, width)
            return host_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)

        places = place_layers(layers, layout)
        by_part = {place.part: layer for layer, place in zip(layers, places, strict=True)}
        shapes = [by_part[part] for part in range(len(by_part))]
        keys, values = [zeros(s, s.key_dim) for s in shapes], [zeros(s, s.value_dim) for s in shapes]
        if device.type == "cpu":
            threading.Thread(target=take_memory, args=([*keys, *values],), daemon=True).start()
        writers = frozenset(index for index, layer in enumerate(layers) if layer.source is None)
        return cls(keys, values, places, scales, writers)

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
        """Return the key tensor, the value tensor, the group index and the scales of a layer."""
        group, part = self.places[layer]
        return self.keys[part], self.values[part], group, None if self.scales is None else self.scales[layer]

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy each block sources[i] to block destinations[i] (int64 [N]).

        All sources are read before anything is written.
        """
        for tensor in self.tensors:
            tensor[destinations] = tensor[sources]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of all keys and values, for copies: fp8 tensors as bytes."""
        return [as_bytes(tensor) for tensor in (*self.keys, *self.values)]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros in host memory. Raises MemoryError if the memory cannot be allocated."""
    try:
        memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(error.strerror) from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def take_memory(tensors: ListLike[torch.Tensor]) -> None:
    """Make Linux allocate all memory of tensors from `host_zeros(...)` now, which takes about a second per 4 GiB."""
    # If memory is short, the process ends now, not hours later when it first uses its last blocks.
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        for start in range(0, tensor.nbytes, _POPULATED_BYTES):
            size = min(_POPULATED_BYTES, tensor.nbytes - start)
            madvise(tensor.data_ptr() + start, size, _MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True)
class PagedContext:
    """KV cache, and the tensors that locate a PackedBatch in the cache."""

    cache: KVCache
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    works: ListLike[Any]  # each layer's result of `prepare_attention`
    #: The result of `prepare_lora`, alone in the list; the list is empty if no token has an adapter.
    lora: ListLike[Any] = ()
    states: StepStates | None = None  # None: the model has no recurrent layers
    #: Numbers of the layers with attention, if the model has other layers too.
    numbers: Mapping[int, int] | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Unpack[AttentionOptions],
    ) -> torch.Tensor:
        """Write a layer's new keys [T, kv_heads, D] and values [T, kv_heads, Dv] to the cache, then compute attention.

        A layer that reads the KV of an earlier layer writes nothing. `query` is [T, heads, D]; the result is [T, heads,
        Dv]. All tensors must be contiguous.
        """
        keys, values, group, options["kv_scales"] = self.cache.of_layer(layer)
        if layer in self.cache.writers:
            write_kv(key, value, keys, values, self.slot_mapping[group], kv_scales=options["kv_scales"])
        return paged_attention(
            query,
            keys,
            values,
            self.block_tables[group],
            self.cu_seqlens_q,
            self.context_lens,
            work=self.works[layer],
            **options,
        )

    def attend_latents(
        self,
        layer: int,
        query: torch.Tensor,
        latents: torch.Tensor,
        rope_keys: torch.Tensor,
        weight: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Write a layer's new latent vectors [T, 1, R] and rotary keys [T, 1, P], then compute latent attention.

        `query` is [T, heads, N + P] and `weight` [heads x (N + M), R]; the result is [T, heads, M].
        """
        kept, kept_ropes, group, scales = self.cache.of_layer(layer)
        write_kv(latents, rope_keys, kept, kept_ropes, self.slot_mapping[group], kv_scales=scales)
        return latent_attention(
            query,
            kept,
            kept_ropes,
            weight,
            self.block_tables[group],
            self.cu_seqlens_q,
            self.context_lens,
            scale=scale,
            kv_scales=scales,
            work=self.works[layer],
        )


class PagedModel(Protocol):
    """Model that runs over the paged KV cache."""

    implementation: Literal["fused", "transformers"]
    layers: list[LayerShape]  # KV of each layer with attention
    attention: list[AttentionShape]  # of each of these layers
    states: ListLike[LayerState]  # of each recurrent layer
    vocab_size: int
    recordable: bool  # True if passes over decodes consist only of torch's operations and recorded kernels

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PagedContext, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute T tokens, write their KV to the cache, and return logits [R, vocab_size].

        `input_ids` and `positions` are [T]. `logit_rows` [R] are the indices of the tokens whose logits are returned.
        None: all T tokens.
        """
        ...


def run_alone(
    model: PagedModel, ids: torch.Tensor, dtype: torch.dtype, logit_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, KVCache]:
    """Compute tokens `ids` [T] in a new cache of type `dtype`. Return the logits and the cache, which has one block."""
    count, device = len(ids), ids.device
    cache = KVCache.allocate(model.layers, 1, KVLayout(count), dtype, device)
    bounds, contexts = np.array([0, count], np.int32), np.array([count], np.int32)
    put: Put = lambda array: torch.tensor(array, device=device)  # noqa: E731
    works = prepare_attention(model.attention, bounds, contexts, device, put)
    positions = torch.arange(count, device=device)
    tables = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
    states = None
    if model.states:
        none = torch.empty(0, dtype=torch.int64, device=device)
        states = StepStates(
            StateTensors(model.states, 1, device), none, none, [StatePiece(0, count, 0, 0, begins=True)]
        )
    context = PagedContext(cache, positions[None], tables, put(bounds), put(contexts), works, states=states)
    return model.forward(ids, positions, context, logit_rows), cache
