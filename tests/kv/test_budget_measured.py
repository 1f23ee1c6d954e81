"""The activation model against what the executor really allocates, by torch's own count on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.budget import activation_bytes, model_shape


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at one time while `work` ran, beyond those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    kineto = profiler.profiler
    assert kineto is not None
    changes = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("hidden", "inner", "vocab", "num_tokens", "num_seqs", "tightness"),
    [(256, 704, 500, 512, 4, 0.98), (64, 96, 20000, 64, 32, 0.7)],
    ids=["layers", "sampler"],
)
def test_steps_stay_within_the_plan_and_near_it(
    dtype: torch.dtype, hidden: int, inner: int, vocab: int, num_tokens: int, num_seqs: int, tightness: float
) -> None:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocab,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    executor = TorchExecutor(model, num_blocks=64, block_size=16, device="cpu", kv_dtype=dtype)
    executor.warmup(num_tokens, num_seqs, 1024)
    measured = peak_bytes(lambda: executor.warmup(num_tokens, num_seqs, 1024))
    shape = model_shape(config, dtype_bytes=dtype.itemsize)
    planned = activation_bytes(shape, num_tokens, num_seqs, dtype.itemsize)
    assert tightness * planned <= measured <= 1.02 * planned
