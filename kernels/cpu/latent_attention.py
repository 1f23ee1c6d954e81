"""Latent attention on a CPU: Numba kernels for decodes and very short chunks, torch's matrix products for others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from llmsched.kernels.cpu.decode_attention import TOKEN, RowList, attend_rows
from llmsched.kernels.cpu.prefill_attention import attend_gathered, gather
from llmsched.kernels.latents import LatentWidths, absorbed, expanded, released


def attend_latent_rows(
    query: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    weight: Tensor,
    block_tables: Tensor,
    listed: RowList,
    output: Tensor,
    widths: LatentWidths,
    *,
    scale: float,
    kv_scales: Tensor | None,
) -> None:
    """Write the attention of the query tokens in `listed` to `output` [tokens, heads, M], with absorbed products."""
    computed = query.dtype if query.dtype in (torch.float32, torch.bfloat16) else torch.float32
    rows = listed.rows.clone()
    rows[TOKEN, :-1] = torch.arange(rows.shape[1] - 1)
    tokens = listed.rows[TOKEN, :-1] if rows.shape[1] - 1 < len(query) else None
    part = query if tokens is None else query[tokens]
    keys, ropes = absorbed(part[..., : widths.key], weight), part[..., widths.key :]
    attended = torch.empty(len(part), query.shape[1], widths.rank, dtype=computed)
    attend_rows(
        keys.to(computed).contiguous(),
        latents,
        latents,
        block_tables,
        RowList(rows, listed.num_splits),
        attended,
        scale=scale,
        kv_scales=kv_scales,
        rope=(ropes.to(computed).contiguous(), rope_keys),
    )
    found = released(attended.to(query.dtype), weight, widths.value)
    if tokens is None:
        output.copy_(found)
    else:
        output[tokens] = found


def attend_latent_chunk(
    query: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    weight: Tensor,
    block_table: Tensor,
    context: int,
    widths: LatentWidths,
    *,
    scale: float,
    kv_scales: Tensor | None,
) -> Tensor:
    """Return the attention of one sequence's chunk, [q_len, heads, M], as `attend_chunk` does."""
    latent_scales, rope_scales = (None, None) if kv_scales is None else kv_scales
    blocks = block_table[: -(-context // latents.shape[2])]
    found = gather(latents, blocks, query.dtype, latent_scales)[0]
    ropes = gather(rope_keys, blocks, query.dtype, rope_scales)[0]
    heads, output = query.shape[1], query.new_empty(*query.shape[:2], widths.value)
    if not widths.expands(np.array(len(query)), np.array(context)):
        keys = torch.cat([found, ropes], 1)[None]
        wide = torch.cat([absorbed(query[..., : widths.key], weight), query[..., widths.key :]], 2)
        attended = attend_gathered(wide, keys, keys, 0, context, scale=scale)
        return output.copy_(released(attended[..., : widths.rank], weight, widths.value))
    # torch's flash attention needs keys and values of one width.
    width, size = max(widths.key + widths.rope, widths.value), widths.key + widths.value
    step = widths.heads_at_once(heads, len(found), query.element_size())
    for first in range(0, heads, step):
        part = slice(first, min(first + step, heads))
        count = part.stop - first
        rows = weight[first * size : part.stop * size]
        keys, values = (torch.zeros(count, len(found), width, dtype=query.dtype) for _ in range(2))
        keys[..., : widths.key], values[..., : widths.value] = expanded(found, rows, count, widths.key)
        keys[..., widths.key : widths.key + widths.rope] = ropes
        queries = torch.nn.functional.pad(query[:, part], (0, width - query.shape[2]))
        output[:, part] = attend_gathered(queries, keys, values, 0, context, scale=scale)[..., : widths.value]
    return output
