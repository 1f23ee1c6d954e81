"""CPU ops: Numba kernels for work that memory bandwidth limits (decodes, KV writes), torch for prefills."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from llmsched.kernels.cpu.compiled import ELEMENTS, jit
from llmsched.kernels.cpu.decode_attention import MAX_ROW_QUERIES, attend_rows
from llmsched.kernels.cpu.prefill_attention import attend_chunk
from llmsched.kernels.reference import AttentionOptions


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Compute `reference.paged_attention`. Raises ValueError unless the caches are float32, bfloat16 or float16."""
    check_dtype(key_cache)
    check_dtype(value_cache)
    options["sinks"], options["slopes"] = as_float32(options.get("sinks")), as_float32(options.get("slopes"))
    output = torch.empty(query.shape[0], query.shape[1], value_cache.shape[3])
    bounds, contexts = cu_seqlens_q.numpy(), context_lens.numpy()
    for sequence in (bounds[1:] - bounds[:-1] > MAX_ROW_QUERIES).nonzero()[0].tolist():
        tokens = slice(bounds[sequence], bounds[sequence + 1])
        table, context = block_tables[sequence], int(contexts[sequence])
        output[tokens] = attend_chunk(query[tokens], key_cache, value_cache, table, context, **options)
    attend_rows(query, key_cache, value_cache, block_tables, bounds, contexts, output, **options)
    return output.to(query.dtype)


def as_float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write KV like `reference.write_kv`. Raises ValueError unless the caches are float32, bfloat16 or float16."""
    slots = slot_mapping.numpy()
    for new, cache in ((key, key_cache), (value, value_cache)):
        check_dtype(cache)
        copy_rows(bits(new.detach().to(cache.dtype)), bits(cache), slots)


@jit()
def copy_rows(rows: Any, cache: Any, slots: Any) -> None:
    """Copy rows[t, h] to slot slots[t] of the cache. Skip negative slots. Both arrays have the same integer type."""
    tokens, kv_heads, _ = rows.shape
    block_size = cache.shape[2]
    for token in range(tokens):
        slot = slots[token]
        if slot >= 0:
            for head in range(kv_heads):
                cache[slot // block_size, head, slot % block_size] = rows[token, head]


def bits(tensor: Tensor) -> Any:
    """Return a NumPy view of the tensor's memory as integers. Numba cannot read bfloat16 and float16."""
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


def check_dtype(cache: Tensor) -> None:
    if cache.dtype not in ELEMENTS:
        raise ValueError(f"KV cache of {cache.dtype} on the CPU; allowed is float32, bfloat16 or float16")
