"""Specification of every op in plain torch: slow but easy to check. Tests compare the other backends with it.

A packed batch holds T new tokens of B sequences, one sequence after the other. The q_len_b new tokens of sequence b are
the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1: many in a prefill chunk, one in a decode.

The KV cache consists of blocks of block_size tokens, [num_blocks, kv_heads, block_size, head_dim]. Position p of
sequence b is in block block_tables[b, p // block_size] at offset p % block_size. Sequences may share blocks. Entries of
a block table after the context, or before a sliding window, are never read.
"""

from __future__ import annotations

from typing import Required, TypedDict

import torch
from torch import Tensor


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `paged_attention`."""

    scale: Required[float]
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    slopes: Tensor | None


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of a packed batch over a paged KV cache that already holds the new keys and values.

    The shapes are: query [T, heads, D], key_cache [num_blocks, kv_heads, block_size, D], value_cache [num_blocks,
    kv_heads, block_size, Dv], block_tables [B, max_blocks] int32, cu_seqlens_q [B + 1] int32, context_lens [B] int32,
    sinks [heads], slopes [heads]. A context length includes the new tokens. Returns [T, heads, Dv] in the query's
    dtype. The softmax is computed in float32.

    Query i of sequence b is at position p = context_lens[b] - q_len_b + i. It attends to the keys 0 to p, or, with a
    `window`, to the keys p - window + 1 to p (transformers' `sliding_window`). Query head h uses KV head h // (heads //
    kv_heads).

    - softcap: a scaled score s becomes softcap * tanh(s / softcap) (Gemma-2).
    - sinks: each head's sink is one more logit in the denominator of the softmax, without a value (gpt-oss).
    - slopes: a key's score is lowered by the head's slope times the distance between key and query in tokens (ALiBi,
      Press et al. 2021).
    """
    group, block_size = query.shape[1] // key_cache.shape[1], key_cache.shape[2]
    output = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    bounds = cu_seqlens_q.tolist()
    for sequence, context in enumerate(context_lens.tolist()):
        rows = slice(bounds[sequence], bounds[sequence + 1])
        first_query = context - (rows.stop - rows.start)
        begin = 0 if window is None else max(0, first_query - window + 1) // block_size * block_size
        table = block_tables[sequence, begin // block_size :]
        keys = gather(key_cache, table, context - begin).repeat_interleave(group, dim=1)
        values = gather(value_cache, table, context - begin).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys.float()) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key_positions = torch.arange(begin, context, device=query.device)
        query_positions = torch.arange(first_query, context, device=query.device)[:, None]
        if slopes is not None:
            scores = scores + slopes.float()[:, None, None] * (key_positions - query_positions)
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink_column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink_column], dim=2)
        weights = torch.softmax(scores, dim=2)[:, :, : context - begin]
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(output.dtype)
    return output


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the new tokens' keys [T, kv_heads, D] and values [T, kv_heads, Dv] to the cache in place.

    `slot_mapping` is [T] int64. Token t is written to block slot_mapping[t] // block_size at offset slot_mapping[t] %
    block_size. A negative slot marks padding, which is not written. No other slot may appear twice.
    """
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[real].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value[real].to(value_cache.dtype)


def gather(cache: Tensor, block_table: Tensor, context: int) -> Tensor:
    """Return the keys or values of the first `context` positions of a block table, [context, kv_heads, head_dim]."""
    num_blocks = -(-context // cache.shape[2])
    blocks = cache[block_table[:num_blocks].long()]
    return blocks.transpose(1, 2).flatten(0, 1)[:context]
