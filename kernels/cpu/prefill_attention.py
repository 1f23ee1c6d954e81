"""Attention of a prefill chunk with torch's matrix products, one tile of queries at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsched.kernels.fp8 import as_bytes

QUERY_TILE = 128


def attend_chunk(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Return the attention of one sequence's chunk, [q_len, heads, value_dim].

    `query` [q_len, heads, head_dim] has the last q_len of the sequence's `context` tokens.
    """
    first_query = context - query.shape[0]
    block_size = key_cache.shape[2]
    first_key = 0 if window is None else max(0, first_query - window + 1) // block_size * block_size
    blocks = block_table[first_key // block_size : -(-context // block_size)]
    key_scales, value_scales = (None, None) if kv_scales is None else kv_scales
    keys = gather(key_cache, blocks, query.dtype, key_scales)
    values = gather(value_cache, blocks, query.dtype, value_scales)
    return attend_gathered(
        query, keys, values, first_key, context, scale=scale, window=window, softcap=softcap, sinks=sinks, slopes=slopes
    )


def attend_gathered(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_key: int,
    context: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Do the same as `attend_chunk` for keys [kv_heads, tokens, D] and values [kv_heads, tokens, Dv].

    They belong to the positions from `first_key` on. There may be more tokens than the `context` tokens.
    """
    first_query = context - query.shape[0]
    output = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
    for start in range(first_query, context, QUERY_TILE):
        stop = min(start + QUERY_TILE, context)
        begin = first_key if window is None else max(first_key, start - window + 1)
        rows, columns = slice(start - first_query, stop - first_query), slice(begin - first_key, stop - first_key)
        tile, tile_keys, tile_values = query[rows].transpose(0, 1), keys[:, columns], values[:, columns]
        positions, key_positions = torch.arange(start, stop)[:, None], torch.arange(begin, stop)
        visible = key_positions <= positions
        if window is not None:
            visible &= key_positions > positions - window
        if softcap is None and sinks is None and slopes is None:
            output[rows] = F.scaled_dot_product_attention(
                tile[None], tile_keys[None], tile_values[None], attn_mask=visible, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        else:
            bias = None if slopes is None else slopes[:, None, None] * (key_positions - positions)  # ALiBi
            attended = attend_tile(tile, tile_keys, tile_values, visible, scale, softcap, sinks, bias)
            output[rows] = attended.transpose(0, 1)
    return output


def gather(cache: Tensor, blocks: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Return the keys or values of all tokens in `blocks` in the type `dtype`, [kv_heads, tokens, head_dim]."""
    # Selecting from a transposed cache would make torch copy the whole cache first.
    found = as_bytes(cache).index_select(0, blocks).transpose(0, 1).flatten(1, 2).view(cache.dtype).to(dtype)
    return found if scales is None else found.mul_(scales[:, None, None].to(dtype))


def attend_tile(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the attention of one tile of queries, computed in float32, [heads, queries, value_dim].

    `query` is [heads, queries, head_dim]. `visible` [queries, keys] is True where a query attends to a key. `bias` is
    added to the scores.
    """
    heads, queries, _ = query.shape
    kv_heads = keys.shape[0]
    grouped = query.reshape(kv_heads, -1, query.shape[2]).float()  # the query heads of one KV head are adjacent
    scores = torch.bmm(grouped, keys.float().transpose(1, 2)).mul_(scale).view(heads, queries, -1)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores += bias
    scores.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, queries, 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : keys.shape[1]]
    return torch.bmm(weights.reshape(kv_heads, -1, keys.shape[1]), values.float()).view(heads, queries, -1)
