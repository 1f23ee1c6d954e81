"""Scales of an fp8 KV cache, read from the checkpoint or measured."""
# Without scales, e4m3 would cut off large keys (its largest number is 448, and Qwen2 has larger keys), and round small
# values coarsely (numbers below 2^-6 have fewer digits). So the largest key and the largest value of each KV head are
# measured once, over a few tokens in the model's own type. Other tokens have larger ones, so a scale leaves ROOM for
# them (in SmolLM2-135M, 512 tokens of text have up to 2.1 times larger ones). This costs no digits, because e4m3 is a
# floating-point type: below 448 / ROOM it still has 11 binades of full precision, and SmolLM2's KL divergence is the
# same for a ROOM of 1, 8 or 64 (measured). Scales never change, so the KV of a prefix does not depend on the request
# that computed it.
#
# Scales are rounded up to powers of two, for the reasons in kernels/fp8.py. This also makes measured scales the same on
# devices that round differently.

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from llmsched.engine.errors import ModelError
from llmsched.engine.model.checkpoint import StateDict, open_checkpoint
from llmsched.engine.model.paged_cache import PagedModel, run_alone
from llmsched.kernels.fp8 import FP8_TYPES

#: Number of tokens for which keys and values are measured.
MEASURED_TOKENS = 128
#: How many times larger than the largest measured number a number may be before it is cut off.
ROOM = 8
#: Types of the KV cache by their names in the settings.
KV_TYPES: Mapping[str, torch.dtype] = {
    **{"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16},
    **{"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2},
}
#: Names of scales in checkpoints of compressed-tensors, ModelOpt and AutoFP8. A kv_scale is for keys and values.
_NAME = re.compile(r"\blayers\.(\d+)\.(?:\w+\.)*(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")


class ScaleName(NamedTuple):
    layer: int
    row: int  # 0: of keys, 1: of values


def scale_names(tensor: str) -> list[ScaleName]:
    """Return the names of the KV cache's scales in a checkpoint's tensor of this name; [] if it has no such scales."""
    found = _NAME.search(tensor)
    return [] if found is None else [ScaleName(int(found[1]), "kv".index(kind)) for kind in found[2] or found[3]]


def checkpoint_scales(directory: Path) -> dict[ScaleName, torch.Tensor]:
    """Read the scales of the KV cache from a checkpoint; {} if it has no scales.

    Raises ModelError for a damaged file.
    """
    return {name: tensor[...] for key, tensor in open_checkpoint(directory).items() for name in scale_names(key)}


def without_scales(state: StateDict) -> StateDict:
    return {name: tensor for name, tensor in state.items() if not scale_names(name)}


def kv_scales(
    model: PagedModel,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    checkpoint: Mapping[ScaleName, torch.Tensor],
    max_tokens: int | None = None,
) -> list[torch.Tensor] | None:
    """Return the scales of each layer in an fp8 cache, float32 [2, kv_heads]. Return None for other caches.

    `dtype` is the type of the model. The scales in `checkpoint` replace measured ones. At most `max_tokens` tokens are
    computed. Raises ModelError for a scale that does not fit the model.
    """
    if kv_dtype not in FP8_TYPES:
        return None
    count = min(MEASURED_TOKENS, max_tokens or MEASURED_TOKENS)
    with torch.inference_mode():
        ids = torch.arange(count, device=device) * 7919 % model.vocab_size
        _, cache = run_alone(model, ids, dtype, torch.tensor([count - 1], device=device))
        pairs = [cache.of_layer(layer)[:2] for layer in range(len(model.layers))]
        largest = [torch.stack([part.float().abs().amax((0, 2, 3)) for part in pair]) for pair in pairs]
    scales = [power_of_two(ROOM * found / torch.finfo(kv_dtype).max) for found in largest]
    for name, given in checkpoint.items():
        layer, row = name
        if layer >= len(scales):
            raise ModelError(f"the checkpoint has a KV scale of layer {layer}, but the model has {len(scales)} layers")
        heads = scales[layer].shape[1]
        if given.numel() not in (1, heads) or not (given.isfinite().all() and (given > 0).all()):
            raise ModelError(
                f"the checkpoint's scale of the {('keys', 'values')[row]} of layer {layer} is "
                f"{given.tolist()}; allowed is one positive number, or one for each of {heads} KV heads"
            )
        scales[layer][row] = power_of_two(given.to(device).float().flatten())
    return [scales[index if layer.source is None else layer.source] for index, layer in enumerate(model.layers)]


def power_of_two(numbers: torch.Tensor) -> torch.Tensor:
    """Round positive numbers up to powers of two. Return 1 for 0, infinity and NaN."""
    mantissa, exponent = torch.frexp(numbers)
    powers = torch.ldexp(torch.ones_like(numbers), exponent - (mantissa == 0.5).int())
    return torch.where((numbers > 0) & numbers.isfinite(), powers, 1.0)
