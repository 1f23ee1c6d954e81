"""CUDA ops, which launch Triton kernels and do not wait for the device.

Each op computes the op of the same name in reference.py, for contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, get_args

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from llmsched.kernels.latents import LatentWidths
from llmsched.kernels.lora import LoraMatrices
from llmsched.kernels.packed_matrix import PackedMatrix
from llmsched.kernels.reference import Activation, AttentionOptions, AttentionShape, Int32, Put
from llmsched.kernels.triton import lora, packed_products
from llmsched.kernels.triton.attention import write_kernel
from llmsched.kernels.triton.expert_ops import route as route
from llmsched.kernels.triton.expert_ops import run_experts as run_experts
from llmsched.kernels.triton.latent_attention import LatentCaches, LatentPart, attend_parts, prepare_latents
from llmsched.kernels.triton.launches import Launch, launch_attention, list_launches
from llmsched.kernels.triton.layer import activation_kernel, latent_kernel, norm_kernel, rotary_kernel
from llmsched.kernels.triton.lora import prepare_lora as prepare_lora
from llmsched.kernels.triton.sampling import sample_kernel
from llmsched.kernels.triton.tiling import (
    choose_tiling,
    gpu_properties,
    padded,
    work_units,
)

ACTIVATION_BLOCK = 1024
#: Tokens of one pass of the sampling kernel, and its warps: with more tokens per thread, registers would spill.
SAMPLING_BLOCK, SAMPLING_WARPS = 2048, 16

_compiled: list[str] = []


def _count_compilation(**details: Any) -> None:
    _compiled.append(details["repr"])


triton.knobs.runtime.jit_post_compile_hook = _count_compilation


def num_compiled() -> int:
    return len(_compiled)


def prepare_attention(
    layers: Sequence[AttentionShape], cu_seqlens_q: Int32, context_lens: Int32, device: torch.device, put: Put
) -> list[Any]:
    """Return the launches of each layer: one for all decodes, and one for all prefill chunks.

    Layers with latent attention have parts (see `latent_attention.prepare_latents`).
    """
    gpu = gpu_properties(device)
    works: dict[AttentionShape, Any] = {}
    for shape in dict.fromkeys(layers):
        if shape.latent is not None:
            works[shape] = prepare_latents(shape, cu_seqlens_q, context_lens, gpu, put)
            continue
        group = shape.heads // shape.kv_heads
        tilings = {
            decodes: choose_tiling(
                capability=gpu.capability,
                decodes=decodes,
                group=group,
                head_dim=shape.key_dim,
                value_dim=shape.value_dim,
                item_size=shape.item_size,
            )
            for decodes in (True, False)
        }
        units = work_units(gpu, shape.kv_heads)
        works[shape] = list_launches(
            cu_seqlens_q, context_lens, tilings, group, window=shape.window, units=units, put=put
        )
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
        work = _work_of(shape, cu_seqlens_q, context_lens)
    launch_attention(work, output, query, key_cache, value_cache, block_tables.contiguous(), kv_heads, **options)
    return output


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
    work: list[LatentPart] | None = None,
) -> Tensor:
    """Compute latent attention. Raises ValueError unless each head of the query is contiguous."""
    _check_heads(query)
    widths = LatentWidths.of(query, latents, rope_keys, weight)
    if work is None:
        sizes = (query.shape[1], 1, widths.rank, widths.rope, None, query.element_size())
        work = _work_of(AttentionShape(*sizes, widths), cu_seqlens_q, context_lens)
    caches = LatentCaches(latents, rope_keys, block_tables.contiguous(), kv_scales)
    return attend_parts(work, query, weight.detach(), caches, widths, scale)


def _work_of(shape: AttentionShape, cu_seqlens_q: Tensor, context_lens: Tensor) -> Any:
    device, lengths = cu_seqlens_q.device, (cu_seqlens_q.cpu().numpy(), context_lens.cpu().numpy())
    return prepare_attention([shape], *lengths, device, lambda array: torch.from_numpy(array).to(device))[0]


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
    eps: float,
    offset: float = 0.0,
    interleaved: bool = False,
    kv_scales: Tensor | None = None,
) -> None:
    tokens, heads, width = query.shape
    rank, rope = latents.shape[3], rope_keys.shape[3]
    if tokens:
        latent_kernel[(tokens, heads + 1)](
            query,
            compressed,
            weight,
            cos,
            sin,
            latents,
            rope_keys,
            slot_mapping,
            query if kv_scales is None else kv_scales,
            eps,
            offset,
            compressed.stride(0),
            HEADS=heads,
            WIDTH=width,
            RANK=rank,
            ROPE=rope,
            BLOCK_L=padded(rank),
            BLOCK_R=padded(rope // 2),
            INTERLEAVED=interleaved,
            FP8=kv_scales is not None,
            num_warps=1,
            enable_fp_fusion=True,
        )


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
