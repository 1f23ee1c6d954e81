"""Attention over a short context must not read or copy the rest of the KV cache."""

from __future__ import annotations

import resource

import torch

from llmsched.kernels.cpu.prefill_attention import gather

CACHE_BYTES = 256 << 20
PAGE = 4096


def test_gathering_a_few_blocks_does_not_copy_the_cache() -> None:
    cache = torch.zeros(CACHE_BYTES // (4 * 16 * 64 * 2), 4, 16, 64, dtype=torch.bfloat16)
    blocks = torch.arange(8, dtype=torch.int32)
    gather(cache, blocks, torch.bfloat16, None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gather(cache, blocks, torch.bfloat16, None)
    touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert touched * PAGE < CACHE_BYTES / 10
