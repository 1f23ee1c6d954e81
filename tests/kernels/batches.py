"""Random packed batches for the kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmsched.kernels.dispatch import prepare_attention
from llmsched.kernels.fp8 import restored, stored
from llmsched.kernels.reference import AttentionShape


@dataclass(frozen=True)
class Shape:
    """Shape of a batch: (q_len, context) of each sequence, model dimensions, options of paged_attention."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False

    def __str__(self) -> str:
        return self.name

    def first_block(self, sequence: int) -> int:
        """The first block of a sequence that any of its queries sees."""
        q_len, context = self.sequences[sequence]
        return 0 if self.window is None else max(0, context - q_len - self.window + 1) // self.block_size


@dataclass
class Batch:
    """`keys` and `values` are the caches' contents per sequence, [context, kv_heads, dim], before they were cut up."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.cu_seqlens_q,
            self.context_lens,
        )

    def prepare(self) -> Any:
        """Return the batch's `work`, without which each call of `paged_attention` on a GPU waits for the lengths."""
        (_, heads, key_dim), (_, kv_heads, _, value_dim) = self.query.shape, self.value_cache.shape
        layer = AttentionShape(heads, kv_heads, key_dim, value_dim, self.options["window"], self.query.element_size())
        device, lengths = self.query.device, (self.cu_seqlens_q.cpu().numpy(), self.context_lens.cpu().numpy())
        return prepare_attention([layer], *lengths, device, lambda array: torch.from_numpy(array).to(device))[0]


def make_batch(
    shape: Shape,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    fp8: torch.dtype | None = None,
) -> Batch:
    """Return a batch of random tokens in blocks of random order. Memory outside all sequences is NaN.

    Tables are padded with an invalid block id. It also replaces the blocks before the window of a sequence's first
    query, because a server frees these blocks. The queries are large enough for the softmax to have peaks. If `fp8` is
    given, the caches have this type and random scales, and the keys and values of the sequences are what they hold.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    value_dim = shape.value_dim or shape.head_dim
    needed = [-(-context // shape.block_size) for _, context in shape.sequences]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    key_cache = torch.full((num_blocks, shape.kv_heads, shape.block_size, shape.head_dim), torch.nan, dtype=dtype)
    value_cache = torch.full((num_blocks, shape.kv_heads, shape.block_size, value_dim), torch.nan, dtype=dtype)
    block_tables = torch.full((len(needed), max(needed) + 1), 2**30, dtype=torch.int32)
    keys = [normal(context, shape.kv_heads, shape.head_dim) for _, context in shape.sequences]
    values = [normal(context, shape.kv_heads, value_dim) for _, context in shape.sequences]
    for sequence, count in enumerate(needed):
        for index in range(shape.first_block(sequence), count):
            block = order.pop()
            block_tables[sequence, index] = block
            part = slice(index * shape.block_size, (index + 1) * shape.block_size)
            filled = len(keys[sequence][part])
            key_cache[block, :, :filled] = keys[sequence][part].transpose(0, 1)
            value_cache[block, :, :filled] = values[sequence][part].transpose(0, 1)
    q_lens = torch.tensor([0] + [q_len for q_len, _ in shape.sequences])
    options: dict[str, Any] = {"scale": shape.head_dim**-0.5, "window": shape.window, "softcap": shape.softcap}
    if shape.sinks:
        options["sinks"] = normal(shape.heads).to(device)
    if shape.slopes:
        options["slopes"] = torch.rand(shape.heads, generator=generator).to(device)
    if fp8 is not None:
        scales = torch.exp2(torch.randint(-5, 2, (2, shape.kv_heads), generator=generator).float())
        key_cache, value_cache = (
            stored(cache.transpose(1, 2).flatten(0, 1), fp8, of_heads).unflatten(0, (num_blocks, -1)).transpose(1, 2)
            for cache, of_heads in zip((key_cache, value_cache), scales, strict=True)
        )
        keys, values = (
            [restored(stored(rows, fp8, of_heads), of_heads) for rows in contents]
            for contents, of_heads in zip((keys, values), scales, strict=True)
        )
        options["kv_scales"] = scales.to(device)
    return Batch(
        query=(2 * normal(int(q_lens.sum()), shape.heads, shape.head_dim)).to(device),
        key_cache=key_cache.contiguous().to(device),
        value_cache=value_cache.contiguous().to(device),
        block_tables=block_tables.to(device),
        cu_seqlens_q=q_lens.cumsum(0).to(torch.int32).to(device),
        context_lens=torch.tensor([context for _, context in shape.sequences], dtype=torch.int32).to(device),
        keys=keys,
        values=values,
        options=options,
    )


MIXED = ((1, 37), (16, 16), (15, 40), (1, 1), (17, 17), (1, 300), (40, 70), (3, 33), (1, 16))

SHAPES = (
    Shape("mixed", MIXED),
    Shape("decodes", ((1, 1), (1, 15), (1, 16), (1, 17), (1, 257), (1, 512), (1, 600))),
    Shape("one chunk", ((33, 33),)),
    Shape("chunk of a long context", ((7, 700), (300, 555))),
    Shape("all heads alike", MIXED, heads=3, kv_heads=3),
    Shape("eight heads to one", MIXED, heads=16, kv_heads=2),
    Shape("head_dim 80", MIXED, head_dim=80),
    Shape("head_dim 96", MIXED, head_dim=96),
    Shape("head_dim 128", MIXED, head_dim=128),
    Shape("head_dim 256", MIXED, heads=2, kv_heads=1, head_dim=256),
    Shape("values narrower than keys", MIXED, head_dim=96, value_dim=64),
    Shape("values wider than keys", MIXED, head_dim=64, value_dim=80),
    Shape("block_size 32", MIXED, block_size=32),
    Shape("window 1", MIXED, window=1),
    Shape("window below a block", MIXED, window=5),
    Shape("window of a block", MIXED, window=16),
    Shape("window across blocks", MIXED, window=37),
    Shape("window beyond the context", MIXED, window=1000),
    Shape("softcap", MIXED, softcap=3.0),
    Shape("sinks", MIXED, sinks=True),
    Shape("softcap, sinks and window", MIXED, softcap=3.0, sinks=True, window=20),
    Shape("slopes", MIXED, slopes=True),
    Shape("slopes, all heads alike", MIXED, heads=3, kv_heads=3, slopes=True),
    Shape("slopes over splits", ((1, 257), (1, 600), (300, 555)), slopes=True),
    Shape("softcap, sinks, slopes and window", MIXED, softcap=3.0, sinks=True, slopes=True, window=20),
    Shape("a sequence without queries", ((1, 20), (0, 30), (20, 20), (0, 7))),
)
