"""The warm-up compiles every variant of a kernel that a batch can reach."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stepping import Stepper, make_sequence
from tiny_models import build_model

from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.executor.warmup import expanding_steps, warmup_steps
from llmsched.kernels.dispatch import num_compiled
from llmsched.kernels.latents import LatentWidths
from llmsched.kernels.reference import AttentionShape
from llmsched.kernels.triton import ops
from llmsched.kernels.triton.expert_ops import choose_expert_tiling
from llmsched.kernels.triton.latent_attention import prepare_latents
from llmsched.kernels.triton.tiling import Gpu, Tiling

Variant = Tiling | Literal["join"]


def variants(rows: list[tuple[int, int]], layer: AttentionShape, gpu: Gpu) -> set[Variant]:
    """Return the tile sizes and the kernels with which a batch of (context, new tokens) launches attention."""
    counts = np.array([count for _, count in rows])
    bounds = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    contexts = np.array([sum(row) for row in rows], np.int32)
    with patch.object(ops, "gpu_properties", lambda device: gpu):
        launches = ops.prepare_attention([layer], bounds, contexts, torch.device("cpu"), torch.from_numpy)[0]
    joins: set[Variant] = {"join" for launch in launches if len(launch.joins)}
    return joins | {launch.tiling for launch in launches}


@settings(deadline=None)
@given(st.data())
def test_every_batch_finds_its_attention_kernel(data: st.DataObject) -> None:
    dim, kv_heads = data.draw(st.sampled_from([64, 80, 128, 256])), data.draw(st.sampled_from([1, 2, 8, 32]))
    window, item_size = data.draw(st.sampled_from([None, 1, 4096])), data.draw(st.sampled_from([2, 4]))
    layer = AttentionShape(
        data.draw(st.sampled_from([1, 3, 4, 8, 71])) * kv_heads, kv_heads, dim, dim, window, item_size
    )
    gpu = Gpu(data.draw(st.sampled_from([20, 58, 108, 132])), data.draw(st.sampled_from([80, 89, 90])))
    tokens = data.draw(st.integers(1, 8192), "max_num_batched_tokens")
    seqs = data.draw(st.integers(1, 256), "max_num_seqs")
    length = data.draw(st.integers(1, 32768), "max_model_len")
    warm = set()
    for step in warmup_steps(tokens, seqs, length):
        assert sum(count for _, count in step.rows) <= tokens
        assert max(map(sum, step.rows)) <= length
        warm |= variants(step.rows, layer, gpu)
    for _ in range(8):
        num_rows = data.draw(st.integers(1, min(seqs, tokens)))
        counts = [1] * num_rows
        counts[0] += data.draw(st.integers(0, min(tokens - num_rows, length - 1)))
        contexts = [data.draw(st.integers(0, length - count)) for count in counts[:2]] + [0] * (num_rows - 2)
        assert variants(list(zip(contexts, counts, strict=False)), layer, gpu) <= warm


def latent_variants(rows: list[tuple[int, int]], layer: AttentionShape, gpu: Gpu) -> set[tuple[Any, ...]]:
    """Return the tiling, or "join", and the heads that are expanded at one time for each launch of a batch."""
    bounds = np.array([0, *accumulate(count for _, count in rows)], np.int32)
    contexts = np.array([sum(row) for row in rows], np.int32)
    found: set[tuple[Any, ...]] = set()
    for part in prepare_latents(layer, bounds, contexts, gpu, torch.from_numpy):
        heads = part.expansion and part.expansion.heads
        for launch in part.launches:
            found |= {(launch.tiling, heads)} | ({("join", heads)} if len(launch.joins) else set())
    return found


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_every_batch_finds_its_kernel_of_latent_attention(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([16, 20, 64, 128]))
    layer = AttentionShape(heads, 1, 512, 64, None, 2, LatentWidths(512, 64, 128, 128))
    gpu = Gpu(data.draw(st.sampled_from([58, 108, 132])), data.draw(st.sampled_from([80, 89, 90])))
    tokens, seqs = data.draw(st.integers(1, 8192), "max_num_batched_tokens"), data.draw(st.integers(1, 64), "seqs")
    length = data.draw(st.integers(1, 65536), "max_model_len")
    steps = warmup_steps(tokens, seqs, length) + expanding_steps([layer], tokens, length)
    assert all(sum(count for _, count in step.rows) <= tokens for step in steps)
    assert all(max(map(sum, step.rows)) <= length for step in steps)
    warm = set[Any]().union(*(latent_variants(step.rows, layer, gpu) for step in steps))
    for _ in range(8):
        counts = [1] * data.draw(st.integers(1, min(seqs, tokens)))
        counts[0] += data.draw(st.integers(0, min(tokens - len(counts), length - 1)))
        contexts = [data.draw(st.integers(0, length - count)) for count in counts[:2]] + [0] * (len(counts) - 2)
        assert latent_variants(list(zip(contexts, counts, strict=False)), layer, gpu) <= warm


@given(st.integers(1, 8192), st.integers(1, 512), st.integers(1, 256), st.integers(1, 10), st.data())
def test_every_batch_finds_its_kernel_of_experts(
    tokens: int, seqs: int, num_experts: int, chosen: int, data: st.DataObject
) -> None:
    chosen = min(chosen, num_experts)
    warm = {
        choose_expert_tiling(chosen * sum(count for _, count in step.rows), num_experts, 2)
        for step in warmup_steps(tokens, seqs, 8192)
    }
    count = data.draw(st.integers(1, tokens))
    assert choose_expert_tiling(chosen * count, num_experts, 2) in warm


def test_nothing_is_compiled_after_the_warm_up_on_a_cpu() -> None:
    """A bfloat16 model has logits of two types in the sampler: its own, and fp32 for penalties."""
    model = build_model("llama", seed=5).to(torch.bfloat16)
    executor = TorchExecutor(model, num_blocks=64, block_size=16, device="cpu", kv_dtype=torch.bfloat16)
    executor.warmup(64, 8, 512)
    before = num_compiled()
    samplings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 5, "logprobs": 2},
        {"temperature": 0, "frequency_penalty": 1.0},
        {"temperature": 1.0, "min_p": 0.1, "prompt_logprobs": 1},
    ]
    for chosen in (samplings[:1], samplings[1:2], samplings):
        sequences = [make_sequence(str(i), list(range(4, 44 + i)), **each) for i, each in enumerate(chosen)]
        Stepper(executor, sequences, 60).generate(3, (20, 3, 1000))
    assert before > 0
    assert num_compiled() == before
