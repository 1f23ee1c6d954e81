"""CUDA ops, which launch Triton kernels and do not wait for the device.

Each op computes the op of the same name in reference.py, for contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack, get_args

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from llmsched.kernels.lora import LoraMatrices
from llmsched.kernels.packed_matrix import PackedMatrix
from llmsched.kernels.reference import Activation, AttentionOptions, AttentionShape, Int32, Put
from llmsched.kernels.triton import lora, packed_products
from llmsched.kernels.triton.attention import LOG2_E, attend_kernel, join_kernel, write_kernel
from llmsched.kernels.triton.expert_ops import route as route
from llmsched.kernels.triton.expert_ops import run_experts as run_experts
from llmsched.kernels.triton.layer import activation_kernel, norm_kernel, rotary_kernel
from llmsched.kernels.triton.lora import prepare_lora as prepare_lora
from llmsched.kernels.triton.sampling import sample_kernel
from llmsched.kernels.triton.tiling import (
    Tiling,
    choose_tiling,
    gpu_properties,
    list_work,
    padded,
    work_units,
)

ACTIVATION_BLOCK = 1024
#: Slots that a join reads at a time.
JOIN_CHUNK = 16

#: Tokens of one pass of the sampling kernel, and its warps: with more tokens per thread, registers would spill.
SAMPLING_BLOCK, SAMPLING_WARPS = 2048, 16

_compiled: list[str] = []


def _count_compilation(**details: Any) -> None:
    _compiled.append(details["repr"])


triton.knobs.runtime.jit_post_compile_hook = _count_compilation


def num_compiled() -> int:
    return len(_compiled)


class Launch(NamedTuple):
    tiling: Tiling
    items: Tensor
    joins: Tensor
    num_slots: int
    tile_queries: int


def prepare_attention(
    layers: Sequence[AttentionShape], cu_seqlens_q: Int32, context_lens: Int32, device: torch.device, put: Put
) -> list[list[Launch]]:
    """Return the launches of each layer: one for all decodes, and one for all prefill chunks."""
    gpu, lengths = gpu_properties(device), cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    kinds = (True, np.flatnonzero(lengths == 1).astype(np.int32)), (False, np.flatnonzero(lengths > 1).astype(np.int32))
    works: dict[AttentionShape, list[Launch]] = {}
    for shape in dict.fromkeys(layers):
        works[shape] = []
        group = shape.heads // shape.kv_heads
        for decodes, sequences in kinds:
            if not len(sequences):
                continue
            tiling = choose_tiling(
                capability=gpu.capability,
                decodes=decodes,
                group=group,
                head_dim=shape.key_dim,
                value_dim=shape.value_dim,
                item_size=shape.item_size,
            )
            found = list_work(
                cu_seqlens_q,
                context_lens,
                sequences,
                tile_queries=tiling.block_m // group,
                block_n=tiling.block_n,
                window=shape.window,
                units=work_units(gpu, shape.kv_heads),
                fixed=decodes and len(sequences) == len(context_lens),
            )
            works[shape].append(Launch(tiling, put(found.items), put(found.joins), found.num_slots, found.tile_queries))
    return [works[shape] for shape in layers]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    *,
    work: list[Launch] | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Compute attention. Raises ValueError unless each head of the query is contiguous."""
    # Products of float32 are computed in full float32, without TF32. Products of 16-bit types are accumulated in
    # float32, and the softmax weights are rounded to the query's dtype, as in every flash attention.
    _check_heads(query)
    tokens, heads, head_dim = query.shape
    _, kv_heads, _, value_dim = value_cache.shape
    output = query.new_empty(tokens, heads, value_dim)
    if work is None:
        shape = AttentionShape(heads, kv_heads, head_dim, value_dim, options.get("window"), query.element_size())
        lengths = cu_seqlens_q.cpu().numpy(), context_lens.cpu().numpy()
        work = prepare_attention([shape], *lengths, query.device, lambda a: torch.from_numpy(a).to(query.device))[0]
    for launch in work:
        places = launch.num_slots, kv_heads, launch.tiling.block_m
        parts = query.new_empty(*places, value_dim, dtype=torch.float32)
        stats = query.new_empty(*places, 2, dtype=torch.float32)
        _attend(launch, output, parts, stats, query, key_cache, value_cache, block_tables.contiguous(), **options)
        if launch.joins.shape[0]:
            join_kernel[(launch.joins.shape[0], heads, launch.tile_queries)](
                output,
                parts,
                stats,
                launch.joins,
                launch.tiling.block_m,
                GROUP=heads // kv_heads,
                KV_HEADS=kv_heads,
                VALUE_DIM=value_dim,
                BLOCK_V=launch.tiling.block_v,
                CHUNK=JOIN_CHUNK,
                enable_fp_fusion=True,
            )
    return output


def _attend(
    launch: Launch,
    output: Tensor,
    parts: Tensor,
    stats: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, value_dim = value_cache.shape
    tiling = launch.tiling
    attend_kernel[(launch.items.shape[0] * kv_heads,)](
        output,
        parts,
        stats,
        query,
        key_cache,
        value_cache,
        block_tables,
        launch.items,
        query if sinks is None else sinks.contiguous(),
        query if slopes is None else slopes.contiguous(),
        query if kv_scales is None else kv_scales,
        scale if softcap is not None else scale * LOG2_E.value,
        softcap or 1.0,
        query.stride(0),
        query.stride(1),
        block_tables.shape[1],
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=tiling.block_d,
        BLOCK_V=tiling.block_v,
        WINDOW=window or 0,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        SLOPES=slopes is not None,
        FP8=kv_scales is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Write KV. Raises ValueError unless each head of key and value is contiguous."""
    _check_heads(key)
    _check_heads(value)
    tokens = slot_mapping.shape[0]
    if tokens == 0:
        return
    key_scales, value_scales = (key, value) if kv_scales is None else kv_scales
    for new, kv, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        _, kv_heads, block_size, dim = kv.shape
        write_kernel[(tokens, kv_heads)](
            new,
            kv,
            slot_mapping,
            scales,
            new.stride(0),
            new.stride(1),
            KV_HEADS=kv_heads,
            BLOCK_SIZE=block_size,
            DIM=dim,
            BLOCK_D=padded(dim),
            FP8=kv_scales is not None,
            num_warps=1,
            enable_fp_fusion=True,
        )


def add_norm(
    residual: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
    branch_weight: Tensor | None = None,
) -> Tensor:
    tokens, size = residual.shape
    output = torch.empty_like(residual)
    if tokens:
        norm_kernel[(tokens,)](
            residual,
            residual if branch is None else branch,
            weight if branch_weight is None else branch_weight,
            weight,
            weight if bias is None else bias,
            output,
            eps,
            offset,
            SIZE=size,
            BLOCK=padded(size),
            BRANCH=branch is not None,
            BRANCH_NORM=branch_weight is not None,
            CENTRED=centred,
            BIAS=bias is not None,
            num_warps=4 if size <= 2048 else 8,
            enable_fp_fusion=True,
        )
    return output


def rotate_and_write(
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float = 0.0,
    offset: float = 0.0,
    query_weight: Tensor | None = None,
    key_weight: Tensor | None = None,
    by_group: bool = False,
    neighbours: bool = False,
    norm_last: bool = False,
    kv_scales: Tensor | None = None,
) -> Tensor:
    tokens, size = projected.shape
    _, kv_heads, block_size, head_dim = key_cache.shape
    heads = size // head_dim - 2 * kv_heads
    query = projected.new_empty(tokens, heads, head_dim)
    if tokens:
        rotary_kernel[(tokens, heads + 2 * kv_heads)](
            projected,
            cos,
            sin,
            projected if query_weight is None else query_weight,
            projected if key_weight is None else key_weight,
            query,
            key_cache,
            value_cache,
            slot_mapping,
            projected if kv_scales is None else kv_scales,
            eps,
            offset,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=head_dim,
            BLOCK_SIZE=block_size,
            ROTATED=cos.shape[1],
            BLOCK_D=padded(head_dim),
            NORM=query_weight is not None,
            BY_GROUP=by_group,
            NEIGHBOURS=neighbours,
            NORM_LAST=norm_last,
            FP8=kv_scales is not None,
            num_warps=1,
            enable_fp_fusion=True,
        )
    return query


def linear(rows: Tensor, weight: Tensor | Sequence[PackedMatrix], bias: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        return F.linear(rows, weight, bias)
    return packed_products.linear(rows, weight, bias, gpu_properties(rows.device))


def add_lora(output: Tensor, rows: Tensor, matrices: LoraMatrices, work: lora.Work) -> None:
    lora.add_lora(output, rows, matrices, work, gpu_properties(rows.device))


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    return _activate(gate_up, gate_up.shape[1] // 2, activation)


def activated(rows: Tensor, activation: Activation) -> Tensor:
    return _activate(rows, rows.shape[1], activation)


def _activate(rows: Tensor, size: int, activation: Activation) -> Tensor:
    tokens = len(rows)
    output = rows.new_empty(tokens, size)
    if tokens:
        activation_kernel[(tokens, -(-size // ACTIVATION_BLOCK))](
            rows,
            output,
            SIZE=size,
            BLOCK=ACTIVATION_BLOCK,
            ACTIVATION=get_args(Activation).index(activation),
            GATED=rows.shape[1] > size,
        )
    return output


def sample(logits: Tensor, parameters: Tensor) -> Tensor:
    rows, width = logits.shape
    outcomes = torch.empty(rows, dtype=torch.int64, device=logits.device)
    shift = 16 if logits.dtype is torch.bfloat16 else 0
    batch = (logits.contiguous(), parameters.contiguous())
    sample_kernel[(rows,)](outcomes, *batch, rows, width, SHIFT=shift, BLOCK=SAMPLING_BLOCK, num_warps=SAMPLING_WARPS)
    return outcomes


def _check_heads(rows: Tensor) -> None:
    if rows.stride(2) != 1:
        raise ValueError(f"heads have strides {rows.stride()}; the last must be 1 (contiguous heads)")
