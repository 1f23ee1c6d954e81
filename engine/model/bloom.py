"""BLOOM model over the paged KV cache.

transformers' attention interface does not pass on BLOOM's biases for positions (ALiBi), so this module calls BLOOM's
layers itself.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import BloomForCausalLM

from llmsched.engine.model.paged import LayerShape, PagedContext
from llmsched.kernels.reference import AttentionShape


class BloomModel:
    """Wrapper that runs a BLOOM model over the paged KV cache; see `PagedModel`.

    The model must be in evaluation mode and on its device.
    """

    implementation: Literal["fused", "transformers"] = "transformers"

    def __init__(self, model: BloomForCausalLM) -> None:
        config = model.config
        self.heads: int = config.n_head
        self.head_dim: int = config.hidden_size // config.n_head
        self.layers = [LayerShape(self.heads, self.head_dim, self.head_dim)] * config.n_layer
        shape = AttentionShape(self.heads, *self.layers[0], item_size=model.dtype.itemsize)
        self.attention = [shape] * config.n_layer
        self.vocab_size: int = config.vocab_size
        self._slopes = alibi_slopes(self.heads).to(model.device)
        self._model: Any = model

    def forward(self, input_ids: Tensor, positions: Tensor, context: PagedContext, logit_rows: Tensor | None) -> Tensor:
        """Compute logits; see `PagedModel.forward`. `positions` is ignored, because ALiBi needs only `context`."""
        inner = self._model.transformer
        hidden = inner.word_embeddings_layernorm(inner.word_embeddings(input_ids))
        for index, block in enumerate(inner.h):
            after_norm = block.apply_residual_connection_post_layernorm
            normed = block.input_layernorm(hidden)
            hidden = self._attention(block.self_attention, index, normed, context) + (normed if after_norm else hidden)
            normed = block.post_attention_layernorm(hidden)
            hidden = block.mlp(normed, normed if after_norm else hidden)
        hidden = inner.ln_f(hidden)
        logits: Tensor = self._model.lm_head(hidden if logit_rows is None else hidden[logit_rows])
        return logits

    def _attention(self, attention: Any, index: int, hidden: Tensor, context: PagedContext) -> Tensor:
        fused = attention.query_key_value(hidden).view(-1, self.heads, 3, self.head_dim)
        query, key, value = (part.contiguous() for part in fused.unbind(2))
        attended = context.attend(index, query, key, value, scale=self.head_dim**-0.5, slopes=self._slopes)
        output: Tensor = attention.dense(attended.flatten(1))
        return output


def alibi_slopes(heads: int) -> Tensor:
    """Return the ALiBi slope of each head, float32 [heads] (Press et al. 2021).

    If the number of heads n is a power of two, head i = 1..n has the slope 2^(-8 i / n). Otherwise let p be the largest
    power of two below n. The first p heads have the slopes of a model with p heads, and the others have every second
    slope of a model with 2 p heads.
    """
    power = 1 << int(math.log2(heads))
    exponents = [8 * head / power for head in range(1, power + 1)]
    exponents += [8 * head / (2 * power) for head in range(1, 2 * power, 2)][: heads - power]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)
