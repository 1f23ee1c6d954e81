"""Random batches of latent attention for the kernels' tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from batches import Shape, make_batch
from torch import Tensor

from llmsched.kernels.latents import LatentWidths
from llmsched.kernels.reference import AttentionShape


class LatentCase(NamedTuple):
    """Lengths (q_len, context) of sequences, and sizes of latent attention."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    widths: LatentWidths = LatentWidths(32, 8, 16, 12)
    block_size: int = 16


MIXED = ((1, 37), (20, 20), (15, 40), (0, 9), (1, 1), (17, 290), (1, 300), (33, 33), (3, 260))
#: Widths of DeepSeek-V2-Lite, which has 16 heads.
DEEPSEEK = LatentWidths(512, 64, 128, 128)
CASES = {
    "mixed": LatentCase(MIXED),
    "decodes": LatentCase(((1, 1), (1, 16), (1, 17), (1, 600))),
    "chunks": LatentCase(((40, 100), (64, 64), (20, 400)), block_size=8),
    "a short chunk of a long context": LatentCase(((20, 700), (2, 300))),
    "many heads": LatentCase(MIXED[:6], heads=40),
    "wide values": LatentCase(MIXED, heads=3, widths=LatentWidths(64, 16, 24, 64), block_size=4),
}


def latent_batch(
    case: LatentCase, *, dtype: torch.dtype = torch.float32, fp8: torch.dtype | None = None, device: str = "cpu"
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the arguments and keyword arguments of `latent_attention`. Memory outside all sequences is NaN."""
    widths, generator = case.widths, torch.Generator().manual_seed(5)
    shape = Shape("", case.sequences, 1, 1, widths.rank, widths.rope, case.block_size)
    cached = make_batch(shape, dtype=dtype, fp8=fp8, device=device)
    _, latents, rope_keys, *rest = cached.tensors
    tokens = sum(length for length, _ in case.sequences)
    query = 3 * torch.randn(tokens, case.heads, widths.key + widths.rope, generator=generator)
    weight = torch.randn(case.heads * (widths.key + widths.value), widths.rank, generator=generator)
    options = {"scale": (widths.key + widths.rope) ** -0.5, "kv_scales": cached.options.get("kv_scales")}
    query, weight = query.to(device, dtype), (weight * widths.rank**-0.5).to(device, dtype)
    return (query, latents, rope_keys, weight, *rest), options


def layer_of(case: LatentCase, item_size: int = 4) -> AttentionShape:
    """Return what `prepare_attention` needs of the layer of a batch."""
    return AttentionShape(case.heads, 1, case.widths.rank, case.widths.rope, None, item_size, case.widths)


def latent_rotary_difference(
    module: Any, expected: Any, dtype: torch.dtype, *, interleaved: bool, cached: torch.dtype | None = None
) -> float:
    """Return the greatest difference of `rotate_and_write_latents` of two modules, in queries and caches."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads, (rank, rope, key, _), block_size = 5, 3, LatentWidths(20, 12, 10, 8), 4
    query, rows = (
        torch.randn(tokens, heads, key + rope, generator=generator),
        torch.randn(tokens, 3 + rank + rope, generator=generator),
    )
    angles, weight = torch.randn(tokens, rope // 2, generator=generator).repeat(1, 2), torch.rand(rank) + 0.5
    slots = torch.tensor([7, 0, -1, 3, 4])
    scales = None if cached is None else torch.tensor([[0.25], [2.0**-9]])
    found = []
    for ops in (module, expected):
        caches = [torch.zeros(2, 1, block_size, width).to(cached or dtype) for width in (rank, rope)]
        turned, strided = query.to(dtype, copy=True), rows.to(dtype)[:, 3:]
        ops.rotate_and_write_latents(
            turned, strided, weight.to(dtype), angles.cos(), angles.sin(), *caches, slots,
            eps=1e-5, offset=0.5, interleaved=interleaved, kv_scales=scales,
        )  # fmt: skip
        found.append(torch.cat([part.float().flatten() for part in (turned, *caches)]))
    return float((found[0] - found[1]).abs().max())
