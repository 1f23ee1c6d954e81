"""Attention of models that do not use transformers' attention interface."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmsched.engine.model.paged_cache import LayerShape
from llmsched.engine.model.probe import AttentionCall
from llmsched.engine.model.support import OWN_ATTENTION


def own_attention(model: PreTrainedModel) -> list[AttentionCall] | None:
    """Return one AttentionCall per layer for a model in OWN_ATTENTION, and None for other models."""
    # Biases for positions are exact. transformers rounds those of BLOOM and MPT to the type of the weights, and those
    # of Falcon to bfloat16, where token numbers from 257 on lose digits.
    if type(model).__name__ not in OWN_ATTENTION:
        return None
    config: Any = model.config
    heads = kv_heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    scale = dim**-0.5
    slopes = alibi_slopes(heads).to(model.device) if config.model_type in ("bloom", "mpt") else None
    if config.model_type == "mpt":
        scale = config.attn_config.softmax_scale or scale
    elif config.model_type == "falcon":
        if config.new_decoder_architecture:
            kv_heads = config.num_kv_heads
        elif config.multi_query:
            kv_heads = 1
        if config.alibi:
            slopes = alibi_slopes(heads).to(model.device) * scale  # Falcon scales the sum of score and bias
    elif config.model_type in ("stablelm", "nemotron"):
        kv_heads = config.num_key_value_heads
    shape, item_size = LayerShape(kv_heads, dim, dim), model.dtype.itemsize
    return [AttentionCall(shape, scale, None, None, heads, item_size, slopes)] * config.num_hidden_layers


def alibi_slopes(heads: int) -> Tensor:
    """Return the ALiBi slope of each head, float32 [heads] (Press et al. 2021)."""
    # If the number of heads n is a power of two, head i = 1..n has the slope 2^(-8 i / n). Otherwise let p be the
    # largest power of two below n. The first p heads have the slopes of a model with p heads, and the others have every
    # second slope of a model with 2 p heads.
    power = 1 << int(math.log2(heads))
    exponents = [8 * head / power for head in range(1, power + 1)]
    exponents += [8 * head / (2 * power) for head in range(1, 2 * power, 2)][: heads - power]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)
