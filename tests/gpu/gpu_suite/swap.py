"""KV blocks copied to host memory and back: exact, beside a busy compute stream, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_suite.rows import CheckRow
from llmsched.engine.executor.host_blocks import HostBlocks
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.model.paged_cache import KVCache, LayerShape

#: Llama-3.1-8B: 32 layers, 8 KV heads of 128.
LAYERS = [LayerShape(8, 128, 128)] * 32
BLOCK = 16


def check_swap(device: str, *, small: bool = False) -> Iterator[CheckRow]:
    """Return two rows: the copied blocks, and the rates of copies."""
    count = 8 if small else 256
    cache = KVCache.allocate(
        LAYERS[:2] if small else LAYERS, 2 * count, KVLayout(BLOCK), torch.bfloat16, torch.device(device)
    )
    host = HostBlocks(cache, count, torch.device(device))
    tensors = (*cache.keys, *cache.values)
    for seed, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel(), device=device).reshape(tensor.shape) % 251 + seed)
    before = [tensor.clone() for tensor in tensors]
    # Device blocks are scattered; host blocks are contiguous except in one place, as after some traffic.
    blocks = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count].tolist()
    host_blocks = [*range(count // 2, count), *range(count // 2)]
    host.swap_out(list(zip(blocks, host_blocks, strict=True)))
    for tensor in tensors:
        tensor.zero_()  # given to the computing stream at once: it must wait for the copies
    out_s = sum(stopwatch.seconds() for stopwatch in host.take_times())
    host.swap_in(list(zip(host_blocks, blocks, strict=True)))
    same = all(torch.equal(now[blocks], was[blocks]) for now, was in zip(tensors, before, strict=True))
    in_s = sum(stopwatch.seconds() for stopwatch in host.take_times())
    rest = [block for block in range(2 * count) if block not in set(blocks)]
    untouched = not any(bool(tensor[rest].any()) for tensor in tensors)
    yield CheckRow("blocks come back as they went", str(same and untouched), "True", same and untouched)
    size = count * cache.num_bytes // (2 * count)
    rates = {"out_bytes_per_s": size / out_s, "in_bytes_per_s": size / in_s}
    yield CheckRow(
        "rate of copies, out and in", " and ".join(f"{r / 1e9:.1f} GB/s" for r in rates.values()), data=rates
    )
