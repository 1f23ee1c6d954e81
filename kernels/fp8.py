"""Types of fp8 KV caches, and how numbers are rounded to them.

An fp8 cache has a scale for the keys and one for the values of each KV head, float32 [2, kv_heads]. It stores
number / scale, rounded to the nearest number of its type, ties to even. Numbers beyond the largest of the type become
the largest (448 in e4m3, 57,344 in e5m2), and NaN stays NaN. Scales are powers of two: division and multiplication by
them round nothing. So all backends store the same bytes, and a kernel can apply scales to scores and sums instead of to
each key and value.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Types of fp8 caches. Source: P. Micikevicius et al., "FP8 formats for deep learning", 2022.
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return an fp8 tensor as uint8, because torch cannot index fp8 everywhere. Return other tensors unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_TYPES else tensor


def stored(rows: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """Return keys or values [T, kv_heads, D] as a cache of type `dtype` stores them. `scales` are [kv_heads]."""
    if scales is None:
        return rows.to(dtype)
    largest = torch.finfo(dtype).max
    return (rows.float() / scales[:, None]).clamp(-largest, largest).to(dtype)


def restored(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Return stored keys or values [T, kv_heads, D] in float32. `scales` are [kv_heads]."""
    return rows.float() if scales is None else rows.float() * scales[:, None]
