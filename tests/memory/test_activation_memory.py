"""The memory model against measurements: activations as torch counts them, the total as the process grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from llmsched.engine.architecture.shape import model_shape
from llmsched.engine.config import ModelImplementation
from llmsched.engine.device import computes_bf16
from llmsched.engine.executor.base import ScheduledRow, StepPlan
from llmsched.engine.executor.buffers import step_bytes
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.memory.activation_memory import CHUNK_TILE, activation_bytes
from llmsched.engine.request import Sequence
from llmsched.engine.sampling_params import SamplingParams
from llmsched.kernels.cpu.prefill_attention import QUERY_TILE


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of bytes allocated while `work` ran, beyond those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    kineto = profiler.profiler
    changes = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_impl", ["fused", "transformers"])
@pytest.mark.parametrize(
    ("hidden", "inner", "vocab", "num_tokens", "num_seqs", "tightness"),
    [(256, 704, 500, 512, 4, 0.98), (64, 96, 20000, 32, 16, 0.7), (32, 48, 49152, 64, 64, 0.7)],
    ids=["layers", "sampler", "sampler of many rows"],
)
def test_steps_stay_within_the_plan_and_near_it(
    dtype: torch.dtype,
    model_impl: ModelImplementation,
    hidden: int,
    inner: int,
    vocab: int,
    num_tokens: int,
    num_seqs: int,
    tightness: float,
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
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "device": "cpu", "kv_dtype": dtype}
    executor = TorchExecutor(model, **sizes, model_impl=model_impl)
    executor.warmup(num_tokens, num_seqs, 1024)
    measured = peak_bytes(lambda: executor.warmup(num_tokens, num_seqs, 1024))
    buffers = 3 * step_bytes(num_tokens, num_seqs, 1024, num_groups=1, block_size=16, num_shapes=1)
    assert buffers < 200_000  # so small that the plan leaves them out
    shape = model_shape(config, dtype_bytes=dtype.itemsize)
    float32_products = dtype is torch.bfloat16 and not computes_bf16("cpu")
    planned = activation_bytes(shape, num_tokens, num_seqs, dtype.itemsize, float32_products=float32_products)
    if model_impl == "fused" or dtype is torch.bfloat16:  # the plan is for the path that takes more
        tightness = min(tightness, 0.7)
    assert tightness * planned <= measured <= 1.02 * planned + buffers


def chunk(start: int, num_tokens: int) -> StepPlan:
    """Return a step that computes the last `num_tokens` of a long prompt."""
    end = start + num_tokens
    sequence = Sequence("r", [0] * end, end, SamplingParams(temperature=0), seed=0, stop_ids=frozenset())
    return StepPlan(
        [ScheduledRow(sequence, start, num_tokens, np.arange(-(-end // 16), dtype=np.int32)[None], sample=True)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_stay_within_the_plan_and_near_it(dtype: torch.dtype) -> None:
    """Every expert has all tokens: the most that a CPU, where experts compute one after the other, can need."""
    sizes = {"hidden_size": 256, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(**sizes, **heads, intermediate_size=64, vocab_size=100, max_position_embeddings=1024)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    executor = TorchExecutor(model, num_blocks=64, block_size=16, device="cpu", kv_dtype=dtype, model_impl="fused")
    executor.warmup(512, 4, 1024)
    measured = peak_bytes(lambda: executor.warmup(512, 4, 1024))
    shape = model_shape(config, dtype_bytes=dtype.itemsize)
    wide = dtype is torch.bfloat16 and not computes_bf16("cpu")
    found = activation_bytes(shape, 512, 4, dtype.itemsize, kind="cpu", context=512, float32_products=wide)
    assert 0.7 * found <= measured <= 1.05 * found, (measured / 512, found / 512)


NARROW = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW |= {"head_dim": 32, "vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 1 << 15}


LATENT = {**NARROW, "kv_lora_rank": 64, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 2, "head_dim": 16}
LATENT |= {"moe_intermediate_size": 32, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (DeepseekV3Config(**LATENT), torch.float32),
        (DeepseekV3Config(**LATENT), torch.bfloat16),
        (LlamaConfig(**NARROW), torch.float32),
        (LlamaConfig(**NARROW), torch.bfloat16),
        (LlamaConfig(**{**NARROW, "num_key_value_heads": 4, "head_dim": 64}), torch.bfloat16),
        (MistralConfig(**NARROW, sliding_window=1024), torch.float32),
        (Gemma2Config(**NARROW, sliding_window=64, attn_logit_softcapping=30.0), torch.bfloat16),
        (GptOssConfig(**NARROW, sliding_window=64, num_local_experts=2, num_experts_per_tok=1), torch.float32),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_a_chunk_of_a_long_prompt_stays_within_the_plan(config: PretrainedConfig, dtype: torch.dtype) -> None:
    context, num_tokens = 4096, 192
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    executor = TorchExecutor(model, num_blocks=context // 16, block_size=16, device="cpu", kv_dtype=dtype)
    step = chunk(context - num_tokens, num_tokens)
    executor.execute(step)
    measured = peak_bytes(lambda: executor.execute(step))
    shape = model_shape(config, dtype_bytes=dtype.itemsize)
    planned = activation_bytes(shape, num_tokens, 1, dtype.itemsize, kind="cpu", context=context)
    assert 0.75 * planned <= measured <= 1.05 * planned
    assert planned > 1.5 * activation_bytes(shape, num_tokens, 1, dtype.itemsize, kind="cpu", context=num_tokens)


def test_the_tile_is_the_kernels() -> None:
    assert CHUNK_TILE == QUERY_TILE
