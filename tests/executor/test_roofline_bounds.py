"""Bounds of the roofline for every GPU and class of engines: never faster than the hardware, and monotonic."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from configs import published_config

from llmsched.engine.architecture.flops import ModelFlops, model_flops
from llmsched.engine.architecture.quantization import quantised_config
from llmsched.engine.executor.cost import StepShape
from llmsched.engine.executor.roofline import Roofline
from llmsched.profiles.engines import engines
from llmsched.profiles.gpus import GpuSpec, find_gpu, gpus

MODELS = {
    "dense": ("meta-llama--Meta-Llama-3.1-8B", None),
    "fp8": ("meta-llama--Meta-Llama-3.1-8B", "fp8"),
    "fp8_block": ("Qwen--Qwen3-8B", "fp8_block"),
    "awq": ("Qwen--Qwen3-8B", "awq"),
    "small": ("Qwen--Qwen3-0.6B", None),
    "experts": ("Qwen--Qwen3-30B-A3B", None),
    "windows": ("openai--gpt-oss-20b", None),
    "latent": ("deepseek-ai--DeepSeek-V3", None),
}
#: Each at least as fast as the next.
LADDERS = (
    ("h200", "h100", "h100-pcie"),
    ("b200", "h100"),
    ("a100-80gb", "a100-80gb-pcie"),
    ("a100-80gb", "a100-40gb", "a10g"),
    ("a40", "a10"),
    ("l40s", "l4"),
    ("rtx5090", "rtx4090", "laptop-rtx4070"),
    ("v100-32gb", "t4"),
)
COUNTS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])

each_gpu = pytest.mark.parametrize("gpu", list(gpus().values()), ids=list(gpus()))
each_model = pytest.mark.parametrize("model", MODELS)


@cache
def work(model: str) -> ModelFlops:
    name, quantization = MODELS[model]
    content = published_config(name)
    if quantization is not None:
        content = quantised_config(content, quantization)
    return model_flops(content, dtype_bytes=2)


def costs(model: str, gpu: GpuSpec) -> list[Roofline]:
    dtype = "bfloat16" if gpu.bf16_flops else "float16"
    return [Roofline(work(model), gpu, engine, dtype=dtype) for engine in engines().values()]


def decodes(count: int | np.ndarray, context: int | np.ndarray) -> StepShape:
    """Return a step of decodes, so many sequences at this context each."""
    kv = count * context
    seen = count * np.minimum(context, 128)
    return StepShape(0 * kv, count + 0 * kv, kv, 0 * kv, 0 * kv, seen, 0 * kv, 0 * kv, count + 0 * kv)  # type: ignore[arg-type]


def prefills(tokens: np.ndarray) -> StepShape:
    """Return a step with one prompt of so many tokens, which samples."""
    none, pairs = 0 * tokens, tokens * (tokens + 1) // 2
    seen = np.minimum(pairs, tokens * 128)
    return StepShape(tokens, none, tokens, tokens, pairs, tokens, tokens, seen, none + 1)  # type: ignore[arg-type]


@each_gpu
@each_model
def test_nothing_is_faster_than_the_hardware(gpu: GpuSpec, model: str) -> None:
    """The bounds: decodes read their weights and KV once, and products run at the datasheet's rate."""
    shape, context = work(model), 2000
    share = shape.experts_per_token / shape.num_experts if shape.num_experts else 0.0
    weights = shape.dense.size + shape.head.size + shape.experts.size * (1 - (1 - share) ** COUNTS)
    kv = sum(part.kv_bytes * (128 if part.windowed else context) for part in shape.attention)
    tokens = np.array([1, 100, 2048, 8192, 32768])
    rate = max(gpu.bf16_flops, gpu.fp16_flops, gpu.fp8_flops if shape.dense.arithmetic != "bf16" else 0.0)
    operations = 2 * (shape.dense.numbers + share * shape.experts.numbers) * tokens
    for cost in costs(model, gpu):
        assert (cost.seconds(decodes(COUNTS, context)) >= (weights + kv * COUNTS) / gpu.bandwidth).all()
        assert (cost.seconds(prefills(tokens)) >= operations / rate).all()


@each_gpu
@each_model
def test_more_work_takes_longer_and_larger_batches_pay(gpu: GpuSpec, model: str) -> None:
    lengths = np.array([1, 10, 127, 128, 129, 1000, 10_000, 100_000])
    for cost in costs(model, gpu):
        batches = np.asarray(cost.seconds(decodes(COUNTS, 1000)))
        assert (np.diff(batches) > 0).all()
        assert (np.diff(batches / COUNTS) < 0).all()
        assert (np.diff(np.asarray(cost.seconds(decodes(64, lengths)))) > 0).all()
        assert (np.diff(np.asarray(cost.seconds(prefills(lengths)))) > 0).all()


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda each: each[0])
@each_model
def test_a_better_card_is_not_slower(ladder: tuple[str, ...], model: str) -> None:
    shapes = [decodes(COUNTS, context) for context in (100, 2000, 20_000)] + [prefills(np.array([1, 512, 8192]))]
    for better, worse in itertools.pairwise(ladder):
        for fast, slow in zip(costs(model, find_gpu(better)), costs(model, find_gpu(worse)), strict=True):
            for shape in shapes:
                assert (np.asarray(fast.seconds(shape)) <= np.asarray(slow.seconds(shape)) * 1.0001).all()
