"""Llama-3.1-8B with random weights: its shape, and a smaller one for runs without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Size:
    """Dimensions of the model (Llama-3.1-8B's by default) and of the measurements."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    context: int = 1024
    long_context: int = 8192
    longest: int = 32768
    prefill: int = 2048
    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    many: int = 32  # rows of the steps that are compared in several ways
    warmup: int = 4
    repeats: int = 20
    dtype: torch.dtype = torch.bfloat16

    @property
    def layer_weights(self) -> int:
        """Number of weights in all layers; each takes part in every token."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """KV bytes per token of context."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights on the device, the embedding included."""
        return (self.layer_weights + 2 * self.head_weights) * self.dtype.itemsize

    def least_seconds(self, rows: Sequence[tuple[int, int]], bandwidth: float, flops: float) -> float:
        """Return the time of a step's bytes or products, whichever takes longer. Rows are (context, new tokens).

        The bytes are all weights, except unused rows of the embedding, and the KV that attention reads.
        """
        tokens = sum(count for _, count in rows)
        read = (self.layer_weights + self.head_weights) * self.dtype.itemsize
        read += sum(context + count for context, count in rows) * self.kv_bytes
        visible = sum(count * (context + count / 2) for context, count in rows)
        products = 2.0 * self.layer_weights * tokens + 2.0 * self.head_weights * len(rows)
        products += 4.0 * visible * self.heads * self.head_dim * self.layers
        return max(read / bandwidth, products / flops)


SMALL = Size(
    layers=2, hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocab=320, context=40, long_context=80,
    longest=200, prefill=48, batches=(1, 3), many=3, warmup=1, repeats=2, dtype=torch.float32,
)  # fmt: skip


def fitting(size: Size, device: str) -> Size:
    """Return the size with as many layers as fit on the device beside the KV of `many` contexts."""
    if device != "cuda":
        return size
    free = 0.85 * torch.cuda.mem_get_info()[0]
    while size.layers > 1 and size.weight_bytes + 1.5 * size.many * size.context * size.kv_bytes > free:
        size = replace(size, layers=size.layers - 1)
    return size


def make_config(size: Size) -> Any:
    return AutoConfig.for_model(
        "llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def make_model(size: Size, device: str) -> Any:
    """Make a Llama with random weights on the device."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(make_config(size), dtype=size.dtype).eval().requires_grad_(False)
