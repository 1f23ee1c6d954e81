"""CPU ops. Numba kernels do the memory-bound work (decodes, KV writes), and torch does prefills.

Each op computes the op of the same name in reference.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from llmsched.kernels import reference
from llmsched.kernels.cpu import layer, sampling
from llmsched.kernels.cpu.compiled import ELEMENTS, jit
from llmsched.kernels.cpu.compiled import STARTS_EMPTY as STARTS_EMPTY
from llmsched.kernels.cpu.compiled import num_compiled as num_compiled
from llmsched.kernels.cpu.decode_attention import MAX_ROW_QUERIES, RowList, attend_rows, list_rows
from llmsched.kernels.cpu.experts import run_experts as run_experts
from llmsched.kernels.cpu.latent_attention import attend_latent_chunk, attend_latent_rows
from llmsched.kernels.cpu.lora import add_lora as add_lora
from llmsched.kernels.cpu.lora import prepare_lora as prepare_lora
from llmsched.kernels.cpu.prefill_attention import attend_chunk
from llmsched.kernels.cpu.products import linear as linear
from llmsched.kernels.cpu.recording import NotRecordableError as NotRecordableError
from llmsched.kernels.cpu.recording import Recording as Recording
from llmsched.kernels.cpu.recording import compile_replay as compile_replay
from llmsched.kernels.experts import route as route
from llmsched.kernels.fp8 import FP8_TYPES, stored
from llmsched.kernels.latents import LatentWidths
from llmsched.kernels.reference import Activation, AttentionOptions, AttentionShape, Int32, Put

#: Types of activations that the kernels write; ops on others use the reference. They also write fp8 caches.
WRITTEN_TYPES = (torch.float32, torch.bfloat16)

sample = sampling.sample


class Work(NamedTuple):
    chunks: list[tuple[slice, int, int]]  # tokens, index of the sequence, length of its context
    listed: RowList  # tokens of all sequences that have no prefill chunk


def prepare_attention(
    layers: Sequence[AttentionShape], cu_seqlens_q: Int32, context_lens: Int32, device: torch.device, put: Put
) -> list[Work]:
    """Return the Work of each layer. Layers with the same window have the same Work."""
    works = {}
    for window in {shape.window for shape in layers}:
        work = list_work(cu_seqlens_q, context_lens, window=window)
        works[window] = work._replace(listed=work.listed._replace(rows=put(work.listed.rows.numpy())))
    return [works[layer.window] for layer in layers]


def list_work(bounds: Int32, contexts: Int32, *, window: int | None) -> Work:
    chunks = [
        (slice(bounds[sequence], bounds[sequence + 1]), sequence, int(contexts[sequence]))
        for sequence in (bounds[1:] - bounds[:-1] > MAX_ROW_QUERIES).nonzero()[0].tolist()
    ]
    rows = list_rows(bounds, contexts, MAX_ROW_QUERIES, window or 0)
    return Work(chunks, RowList(torch.from_numpy(rows), int(rows[-1, -1])))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    work: Work | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Compute attention. Raises ValueError for caches of a type that is not in ELEMENTS."""
    check_dtype(key_cache)
    check_dtype(value_cache)
    options["sinks"], options["slopes"] = as_float32(options.get("sinks")), as_float32(options.get("slopes"))
    if work is None:
        work = list_work(cu_seqlens_q.numpy(), context_lens.numpy(), window=options.get("window"))
    computed = query.dtype if query.dtype in WRITTEN_TYPES else torch.float32
    output = torch.empty(query.shape[0], query.shape[1], value_cache.shape[3], dtype=computed)
    for tokens, sequence, context in work.chunks:
        table = block_tables[sequence]
        output[tokens] = attend_chunk(query[tokens], key_cache, value_cache, table, context, **options)
    if work.listed.num_splits:
        rows, block_tables = query.detach().to(computed).contiguous(), block_tables.contiguous()
        attend_rows(
            rows,
            key_cache,
            value_cache,
            block_tables,
            work.listed,
            output,
            scale=options["scale"],
            softcap=options.get("softcap"),
            sinks=options["sinks"],
            slopes=options["slopes"],
            kv_scales=options.get("kv_scales"),
        )
    return output.to(query.dtype)


def latent_attention(
    query: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    weight: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    kv_scales: Tensor | None = None,
    work: Work | None = None,
) -> Tensor:
    """Compute latent attention. Raises ValueError for caches of a type that is not in ELEMENTS."""
    check_dtype(latents)
    check_dtype(rope_keys)
    if work is None:
        work = list_work(cu_seqlens_q.numpy(), context_lens.numpy(), window=None)
    widths, block_tables = LatentWidths.of(query, latents, rope_keys, weight), block_tables.contiguous()
    output = query.new_empty(*query.shape[:2], widths.value)
    batch = (latents, rope_keys, weight.detach())
    for tokens, sequence, context in work.chunks:
        output[tokens] = attend_latent_chunk(
            query[tokens], *batch, block_tables[sequence], context, widths, scale=scale, kv_scales=kv_scales
        )
    if work.listed.num_splits:
        attend_latent_rows(query, *batch, block_tables, work.listed, output, widths, scale=scale, kv_scales=kv_scales)
    return output


def as_float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Write KV. Raises ValueError for caches of a type that is not in ELEMENTS."""
    slots, (key_scales, value_scales) = slot_mapping.numpy(), (None, None) if kv_scales is None else kv_scales
    for new, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        check_dtype(cache)
        copy_rows(bits(stored(new.detach(), cache.dtype, scales)), bits(cache), slots)


def add_norm(
    residual: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    add_norm = layer.add_norm if residual.dtype in WRITTEN_TYPES else reference.add_norm
    return add_norm(residual, branch, weight, bias, **options)


def rotate_and_write(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> Tensor:
    written = projected.dtype in WRITTEN_TYPES and key_cache.dtype in (*WRITTEN_TYPES, *FP8_TYPES)
    rotate_and_write = layer.rotate_and_write if written else reference.rotate_and_write
    return rotate_and_write(projected, cos, sin, key_cache, value_cache, slot_mapping, **options)


def rotate_and_write_latents(
    query: Tensor,
    compressed: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    latents: Tensor,
    rope_keys: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
    **options: Any,
) -> None:
    rows, key = reference.rotated_latents(query, compressed, weight, cos, sin, latents.shape[3], **options)
    write_kv(rows, key, latents, rope_keys, slot_mapping, kv_scales=kv_scales)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    gated = layer.gated if gate_up.dtype in WRITTEN_TYPES else reference.gated
    return gated(gate_up, activation)


def activated(rows: Tensor, activation: Activation) -> Tensor:
    activated = layer.activated if rows.dtype in WRITTEN_TYPES else reference.activated
    return activated(rows, activation)


@jit()
def copy_rows(rows: Any, cache: Any, slots: Any) -> None:
    """Copy rows[t, h] to slot slots[t] of the cache for each token t and head h. Skip negative slots."""
    tokens, kv_heads, _ = rows.shape
    block_size = cache.shape[2]
    for token in range(tokens):
        slot = slots[token]
        if slot >= 0:
            for head in range(kv_heads):
                cache[slot // block_size, head, slot % block_size] = rows[token, head]


def bits(tensor: Tensor) -> Any:
    """Return a NumPy view of the tensor's memory as integers, because NumPy lacks some of torch's types."""
    return tensor.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.itemsize]).numpy()


def check_dtype(cache: Tensor) -> None:
    if cache.dtype not in ELEMENTS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENTS)
        raise ValueError(f"KV cache of {cache.dtype} on the CPU; allowed is {allowed}")
