"""The CPU's ops: Numba where memory is the limit (decodes, KV writes), torch's products where arithmetic is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmsched.kernels.cpu.chunks import attend_chunk
from llmsched.kernels.cpu.compiled import ELEMENTS, jit
from llmsched.kernels.cpu.rows import attend_rows, list_rows

MAX_ROW_QUERIES = 16  # of one sequence; beyond, products win (measured: the two meet between 12 and 24)


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
    """As `reference.paged_attention`. The caches must be contiguous, in float32, bfloat16 or float16."""
    check_cache(key_cache)
    check_cache(value_cache)
    if sinks is not None:
        sinks = sinks.detach().float().contiguous()
    if slopes is not None:
        slopes = slopes.detach().float().contiguous()
    output = torch.empty(query.shape[0], query.shape[1], value_cache.shape[3])
    bounds, contexts = cu_seqlens_q.numpy(), context_lens.numpy()
    for sequence in (bounds[1:] - bounds[:-1] > MAX_ROW_QUERIES).nonzero()[0].tolist():
        tokens = slice(bounds[sequence], bounds[sequence + 1])
        output[tokens] = attend_chunk(
            query[tokens],
            key_cache,
            value_cache,
            block_tables[sequence],
            int(contexts[sequence]),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
    rows = list_rows(bounds, contexts, MAX_ROW_QUERIES, window or 0)
    if rows.shape[1] > 1:
        attend_rows(
            query.detach().float().contiguous(),
            key_cache,
            value_cache,
            block_tables.contiguous(),
            rows,
            output,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            slopes=slopes,
        )
    return output.to(query.dtype)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `reference.write_kv`. The caches must be contiguous, in float32, bfloat16 or float16."""
    slots = slot_mapping.numpy()
    for new, cache in ((key, key_cache), (value, value_cache)):
        check_cache(cache)
        copy_rows(bits(new.detach().to(cache.dtype)), bits(cache), slots)


@jit()
def copy_rows(rows: Any, cache: Any, slots: Any) -> None:
    """cache[block, h, offset] = rows[t, h], of two arrays of the same bits."""
    tokens, kv_heads, _ = rows.shape
    block_size = cache.shape[2]
    for token in range(tokens):
        slot = slots[token]
        if slot >= 0:
            for head in range(kv_heads):
                cache[slot // block_size, head, slot % block_size] = rows[token, head]


def bits(tensor: Tensor) -> Any:
    """A tensor's memory as Numba can read it."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def check_cache(cache: Tensor) -> None:
    """Raise ValueError for a cache whose memory compiled code cannot walk through."""
    if cache.dtype not in ELEMENTS:
        raise ValueError(f"KV cache of {cache.dtype} on the CPU; allowed is float32, bfloat16 or float16")
    if not cache.is_contiguous():
        raise ValueError(f"KV cache with strides {cache.stride()} on the CPU; it must be contiguous")
