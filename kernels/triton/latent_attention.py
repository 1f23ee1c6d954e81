"""Latent attention on CUDA: absorbed products for decodes and short chunks, expanded keys and values for others."""
# The kernel of paged attention computes both. In the absorbed way, the KV heads of the kernel are groups of query heads
# that share the latent vectors. In the expanded way, the keys and values of some sequences are computed from copies of
# their latent vectors, in new blocks.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmsched.kernels.fp8 import as_bytes
from llmsched.kernels.latents import LatentWidths, absorbed, expanded, released
from llmsched.kernels.reference import AttentionShape, Int32, Put
from llmsched.kernels.triton.launches import Launch, Rope, launch_attention, list_launches
from llmsched.kernels.triton.tiling import (
    Gpu,
    choose_expanded_tiling,
    choose_latent_tiling,
    latent_group,
    work_units,
)

Indices = npt.NDArray[Any]
#: Tokens in a block of expanded keys and values.
BLOCK_SIZE = 16


class Expansion(NamedTuple):
    """Copies of the latent vectors of some sequences."""

    places: Tensor  # int32 [2, C]: sequence and position of each copied token
    tables: Tensor  # int32 [S, max_blocks], block tables of the copies
    heads: int  # that are expanded at one time


class LatentPart(NamedTuple):
    """Sequences of a batch whose latent attention is computed in the same way."""

    tokens: Tensor | None  # int32 [t], indices of their tokens in the batch; None if they are all tokens
    launches: list[Launch]
    expansion: Expansion | None  # None: absorbed products


class LatentCaches(NamedTuple):
    """Arguments of `reference.latent_attention`."""

    latents: Tensor
    rope_keys: Tensor
    block_tables: Tensor
    kv_scales: Tensor | None


def prepare_latents(shape: AttentionShape, bounds: Int32, contexts: Int32, gpu: Gpu, put: Put) -> list[LatentPart]:
    """Divide a batch into parts: one for absorbed products, and others for expanded keys and values."""
    assert shape.latent is not None
    widths, heads, item_size = shape.latent, shape.heads, shape.item_size
    lengths = bounds[1:] - bounds[:-1]
    expands = (lengths > 1) & widths.expands(lengths, contexts)
    parts = []
    for sequences in _groups(np.flatnonzero(expands), contexts, widths, heads, item_size):
        # Few kinds of launches, because each is compiled once.
        copied = int(_whole_blocks(contexts[sequences]).sum())
        at_once = heads if widths.heads_at_once(heads, copied, item_size) == heads else 1

        tiling = choose_expanded_tiling(
            capability=gpu.capability, head_dim=widths.key, value_dim=widths.value, item_size=item_size
        )
        tokens, own = _tokens_of(sequences, bounds)
        launches = list_launches(
            own, contexts[sequences], dict.fromkeys((True, False), tiling), 1, units=work_units(gpu, at_once), put=put
        )
        places, tables = _copies(sequences, contexts)
        parts.append(LatentPart(put(tokens), launches, Expansion(put(places), put(tables), at_once)))
    rest = np.flatnonzero(~expands & (lengths > 0))
    if len(rest):
        group = latent_group(heads)
        tiling = choose_latent_tiling(group=group, rank=widths.rank, item_size=item_size)
        tokens, _ = _tokens_of(rest, bounds)
        own = np.zeros_like(bounds)
        own[1:] = np.where(expands, 0, lengths).cumsum()
        launches = list_launches(
            own, contexts, dict.fromkeys((True, False), tiling), group, units=work_units(gpu, heads // group), put=put
        )
        parts.append(LatentPart(None if len(rest) == len(contexts) else put(tokens), launches, None))
    return parts


def _groups(sequences: Indices, contexts: Int32, widths: LatentWidths, heads: int, item_size: int) -> Iterator[Indices]:
    """Divide sequences into groups whose expanded keys and values fit into memory at one time."""
    group: list[int] = []
    total = 0
    for sequence in sequences.tolist():
        context = int(_whole_blocks(contexts[sequence]))
        if group and widths.heads_at_once(heads, total + context, item_size) < heads:
            yield np.array(group)
            group, total = [], 0
        group.append(sequence)
        total += context
    if group:
        yield np.array(group)


def _whole_blocks(contexts: Indices) -> Indices:
    return -(-contexts // BLOCK_SIZE) * BLOCK_SIZE


def _tokens_of(sequences: Indices, bounds: Int32) -> tuple[Int32, Int32]:
    """Return the indices of the tokens of some sequences, and the cu_seqlens_q of these sequences alone."""
    lengths = (bounds[1:] - bounds[:-1])[sequences]
    own = np.zeros(len(sequences) + 1, np.int32)
    own[1:] = lengths.cumsum()
    tokens = np.arange(own[-1]) + (bounds[sequences] - own[:-1]).repeat(lengths)
    return tokens.astype(np.int32), own


def _copies(sequences: Indices, contexts: Int32) -> tuple[Int32, Int32]:
    """Return `places` and `tables` of an Expansion. The last token of a sequence fills its last block."""
    sizes = _whole_blocks(contexts[sequences])
    firsts = sizes.cumsum() - sizes
    positions = np.arange(int(sizes.sum())) - firsts.repeat(sizes)
    positions = np.minimum(positions, (contexts[sequences] - 1).repeat(sizes))
    blocks = firsts[:, None] // BLOCK_SIZE + np.arange(int(sizes.max()) // BLOCK_SIZE)
    return np.stack([sequences.repeat(sizes), positions]).astype(np.int32), blocks.astype(np.int32)


def attend_parts(
    parts: list[LatentPart],
    query: Tensor,
    weight: Tensor,
    caches: LatentCaches,
    widths: LatentWidths,
    scale: float,
) -> Tensor:
    """Return the latent attention of all parts of a batch, [T, heads, M]."""
    output = query.new_empty(*query.shape[:2], widths.value)
    for part in parts:
        rows = query if part.tokens is None else query[part.tokens]
        if part.expansion is None:
            found = _attend_absorbed(part, rows, weight, caches, widths, scale)
        else:
            found = _attend_expanded(part.launches, part.expansion, rows, weight, caches, widths, scale)
        if part.tokens is None:
            return found
        output[part.tokens] = found
    return output


def _attend_absorbed(
    part: LatentPart, query: Tensor, weight: Tensor, caches: LatentCaches, widths: LatentWidths, scale: float
) -> Tensor:
    keys, heads = absorbed(query[..., : widths.key], weight), query.shape[1]
    attended = query.new_empty(len(query), heads, widths.rank)
    launch_attention(
        part.launches,
        attended,
        keys,
        caches.latents,
        caches.latents,
        caches.block_tables,
        heads // latent_group(heads),
        scale=scale,
        kv_scales=caches.kv_scales,
        rope=Rope(query[..., widths.key :], caches.rope_keys, latent=True),
    )
    return released(attended, weight, widths.value)


def _attend_expanded(
    launches: list[Launch],
    expansion: Expansion,
    query: Tensor,
    weight: Tensor,
    caches: LatentCaches,
    widths: LatentWidths,
    scale: float,
) -> Tensor:
    latents, rope_keys = _copied(expansion.places, caches, query.dtype)
    output = query.new_empty(*query.shape[:2], widths.value)
    step, size = expansion.heads, widths.key + widths.value
    for first in range(0, query.shape[1], step):
        part = query[:, first : first + step]
        rows = weight[first * size : (first + step) * size]
        # [heads, C, D] becomes [blocks, heads, BLOCK_SIZE, D].
        keys, values = (
            states.reshape(step, -1, BLOCK_SIZE, states.shape[2]).transpose(0, 1).contiguous()
            for states in expanded(latents, rows, step, widths.key)
        )
        found = output if step == query.shape[1] else query.new_empty(len(query), step, widths.value)
        rope = Rope(part[..., widths.key :], rope_keys, latent=False)
        launch_attention(
            launches, found, part[..., : widths.key], keys, values, expansion.tables, step, scale=scale, rope=rope
        )
        if found is not output:
            output[:, first : first + step] = found
    return output


def _copied(places: Tensor, caches: LatentCaches, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return copies of latent vectors [C, R] and of rotary keys [blocks, 1, BLOCK_SIZE, P] in the type `dtype`."""
    block_size = caches.latents.shape[2]
    sequences, positions = places.long()
    slots = caches.block_tables[sequences, positions // block_size] * block_size + positions % block_size
    copies = []
    for row, cache in enumerate((caches.latents, caches.rope_keys)):
        found = as_bytes(cache).view(-1, cache.shape[3])[slots].view(cache.dtype).to(dtype)
        copies.append(found if caches.kv_scales is None else found * caches.kv_scales[row].to(dtype))
    return copies[0], copies[1].view(-1, 1, BLOCK_SIZE, copies[1].shape[1])
