"""Run by test_triton.py in a process of its own with TRITON_INTERPRET=1: the Triton kernels on the CPU.

The variable must be set before triton is imported, and would spoil compilation in the tests' own process. Prints one
JSON object: for each case the greatest difference from the reference. Attention in bfloat16 is left out: the
interpreter's arithmetic for it is wrong.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from batches import Shape, make_batch
from latent_batches import CASES as LATENT_CASES
from latent_batches import latent_batch, latent_rotary_difference
from layers import NORM_CASES, ROTARY_CASES, gate_difference, norm_difference, normal, rotary_difference
from lora_products import PRODUCTS, lora_difference, random_products
from mixtures import MIXTURES, ROUTINGS, mixture_difference, routing_difference
from packed_matrices import KINDS, product_error, random_matrix, relative_error
from test_fp8 import hard_numbers
from triton.runtime import interpreter

from llmsched.kernels import reference
from llmsched.kernels.experts import Routing
from llmsched.kernels.fp8 import FP8_TYPES
from llmsched.kernels.reference import AttentionShape
from llmsched.kernels.triton import ops, packed_products, tiling

FEW = ((1, 37), (16, 16), (15, 40), (0, 9), (1, 1), (17, 17), (1, 100), (3, 33))
DECODES = ((1, 1), (1, 16), (1, 17), (1, 150), (1, 300))


def shape(name: str, sequences: tuple[tuple[int, int], ...] = FEW, **change: Any) -> Shape:
    return Shape(name, sequences, **{"heads": 4, "kv_heads": 2, **change})


SHAPES = (
    shape("mixed"),
    shape("decodes", DECODES),
    shape("chunk of a long context", ((24, 150),)),
    shape("all heads alike", heads=2),
    shape("three heads to one", heads=6),
    shape("eight heads to one", heads=8, kv_heads=1),
    shape("head_dim 80, values of 48", head_dim=80, value_dim=48),
    shape("head_dim 128", head_dim=128),
    shape("head_dim 256", FEW[:4], heads=2, kv_heads=1, head_dim=256),
    shape("block_size 32", block_size=32),
    shape("block_size 8", block_size=8),
    shape("window 1", window=1),
    shape("window below a block", window=5),
    shape("window across blocks", window=37),
    shape("window beyond the context", window=1000),
    shape("softcap", softcap=3.0),
    shape("sinks", sinks=True),
    shape("softcap, sinks and window", softcap=3.0, sinks=True, window=20),
    shape("slopes", slopes=True),
    shape("slopes, decodes", DECODES, slopes=True),
    shape("long decode", ((1, 700), (1, 33))),
    shape("softcap, slopes and window", softcap=3.0, slopes=True, window=20),
)
SPLIT = (
    "mixed",
    "decodes",
    "chunk of a long context",
    "window across blocks",
    "sinks",
    "slopes, decodes",
    "long decode",
)
#: The last queries of a tile attend to no key of its first item.
NARROW = shape("narrow window", ((100, 100), (1, 100)), heads=2, window=5)


def attention_difference(
    case: Shape,
    dtype: torch.dtype,
    *,
    num_processors: int = 1,
    min_split: int = 256,
    fp8: torch.dtype | None = None,
) -> float:
    batch = make_batch(case, dtype=dtype, fp8=fp8)
    expected = reference.paged_attention(*batch.tensors, **batch.options)
    query = batch.query.transpose(0, 1).contiguous().transpose(0, 1)  # strided, as transformers hands it over
    processors = patch.object(ops, "gpu_properties", lambda device: tiling.Gpu(num_processors, 90))
    with processors, patch.object(tiling, "MIN_SPLIT_TOKENS", min_split):
        actual = ops.paged_attention(query, *batch.tensors[1:], **batch.options)
    return float((actual.float() - expected.float()).abs().max())


def write_difference() -> float:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 6, d, generator=generator).transpose(0, 1) for d in (80, 48))
    caches = [torch.randn(5, 3, 16, d, generator=generator).half() for d in (80, 48)]
    expected = [cache.clone() for cache in caches]
    slots = torch.tensor([79, 0, -1, 17, 32, 3])
    reference.write_kv(key, value, *expected, slots)
    ops.write_kv(key, value, *caches, slots)
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(caches, expected, strict=True))


def fp8_writes(fp8: torch.dtype) -> int:
    """Write all numbers at and around the middles of neighbouring fp8 numbers. Return how many differ."""
    numbers = hard_numbers(fp8)
    numbers = numbers[~numbers.isnan()]  # the interpreter converts NaN to a number
    rows = torch.stack([numbers * scale for scale in (0.125, 4.0, 2.0, 0.5)]).view(1, 4, -1)
    scales, slots, differing = torch.tensor([[0.125, 4.0], [2.0, 0.5]]), torch.tensor([6]), 0
    for name in ("write_kv", "rotate_and_write"):
        written = []
        for module in (reference, ops):
            caches = torch.zeros(2, 3, 2, 4, len(numbers), dtype=torch.uint8).view(fp8).unbind(0)
            if name == "write_kv":
                module.write_kv(rows[:, :2], rows[:, 2:], *caches, slots, kv_scales=scales)
            else:
                tables, projected = torch.empty(2, 1, 0), torch.cat([rows[:, :2], rows], dim=1).flatten(1)
                module.rotate_and_write(projected, *tables, *caches, slots, kv_scales=scales)
            written.append(torch.stack([cache.float() for cache in caches]))  # the sign of 0 does not count
        differing += int((written[0] != written[1]).sum())
    return differing


def random_difference(count: int) -> float:
    """Compare batches with random lengths and options, most with contexts that are divided among programs."""
    generator = random.Random(0)
    differences = []
    for _ in range(count):
        kv_heads, group = generator.choice([(1, 1), (1, 3), (2, 2), (1, 17)])
        sequences = []
        for _ in range(generator.randint(1, 7)):
            context = generator.choice([1, 15, 16, 17, 64, 65, generator.randint(1, 400)])
            sequences.append((generator.choice([1, 1, generator.randint(0, min(context, 40))]), context))
        case = Shape(
            "random", tuple(sequences), kv_heads * group, kv_heads, head_dim=16,
            block_size=generator.choice([1, 8, 16]), window=generator.choice([None, None, 3, 100]),
            softcap=generator.choice([None, 3.0]), sinks=generator.random() < 0.5, slopes=generator.random() < 0.5,
        )  # fmt: skip
        differences.append(
            attention_difference(case, torch.float32, num_processors=generator.choice([2, 30]), min_split=16)
        )
    return max(differences)


def replay_difference() -> float:
    """Launch what was prepared for other contexts, with the arrays' new contents, as a CUDA graph does."""
    layer = AttentionShape(4, 2, 64, 64, None, 4)
    works = []
    with (
        patch.object(ops, "gpu_properties", lambda device: tiling.Gpu(9, 90)),
        patch.object(tiling, "MIN_SPLIT_TOKENS", 16),
    ):
        for contexts in ((70, 1, 300, 1), (400, 33, 2, 1)):
            batch = make_batch(shape("", tuple((1, context) for context in contexts)))
            lengths = batch.cu_seqlens_q.numpy(), batch.context_lens.numpy()
            works.append(ops.prepare_attention([layer], *lengths, batch.query.device, torch.from_numpy)[0])
    for old, new in zip(*works, strict=True):
        old.items.copy_(new.items)
        old.joins.copy_(new.joins)
    actual = ops.paged_attention(*batch.tensors, work=works[0], **batch.options)
    return float((actual - reference.paged_attention(*batch.tensors, **batch.options)).abs().max())


def lora_replay_difference() -> float:
    """Launch what was prepared for other adapters, with the arrays' new contents, as a CUDA graph does."""
    output, rows, matrices = random_products(PRODUCTS["decodes"], torch.float32)
    steps = [np.array(adapters, np.int32) for adapters in ((0, -1, -1, -1, 1, 1, 1, 1), (2, 0, 1, -1, 2, -1, 0, 2))]
    old, new = (ops.prepare_lora(adapters, 3, lambda array: torch.from_numpy(array.copy())) for adapters in steps)
    for before, after in zip(old, new, strict=True):
        before.copy_(after)
    expected = output.clone()
    with patch.object(ops, "gpu_properties", lambda device: tiling.Gpu(9, 90)):
        ops.add_lora(output, rows, matrices, old)
    reference.add_lora(expected, rows, matrices, torch.from_numpy(steps[1]))
    return float((output - expected).abs().max())


def large_cache_difference() -> float:
    """Write and attend to blocks behind 2^31 numbers. The system provides memory only for what is touched."""
    num_blocks = 2**31 // (16 * 64) + 4
    cache = torch.empty(num_blocks, 1, 16, 64, dtype=torch.float16)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(20, heads, 64, generator=generator).half() for heads in (2, 1))
    tables = torch.tensor([[num_blocks - 1, num_blocks - 3]], dtype=torch.int32)
    positions = torch.arange(20)
    slots = tables[0][positions // 16].long() * 16 + positions % 16
    ops.write_kv(key, key, cache, cache, slots)
    lengths = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    with patch.object(ops, "gpu_properties", lambda device: tiling.Gpu(1, 90)):
        actual = ops.paged_attention(query, cache, cache, tables, *lengths, scale=0.125)
    expected = reference.paged_attention(query, cache, cache, tables, *lengths, scale=0.125)
    written = cache[tables[0].long()].flatten(0, 2)[:20]
    assert torch.equal(written, key[:, 0])
    return float((actual.float() - expected.float()).abs().max())


def sampling_differences() -> int:
    """Return how many rows get another token than by the reference."""
    generator = torch.Generator().manual_seed(3)
    temperature, top_k, top_p, min_p = (0.0, 0.7), (0, 5, 300), (1.0, 0.9), (0.0, 0.05)
    settings = torch.tensor(list(itertools.product(temperature, top_k, top_p, min_p)), dtype=torch.float64).T
    rows = settings.shape[1]
    words = torch.randint(1 << 32, (2, rows), generator=generator)
    parameters = torch.cat([settings, words.double()])
    count = 0
    for spread, width, dtype in ((3, 5000, torch.float32), (0.05, 700, torch.float16), (2, 4096, torch.bfloat16)):
        logits = (torch.randn(rows, width, generator=generator) * spread).to(dtype)
        logits[::3] = (logits[::3] * 4).round() / 4
        logits[5], logits[6, 9], logits[10, 3] = float("-inf"), float("nan"), float("inf")
        logits[17, :50], logits[18, ::2] = float("-inf"), -0.0
        count += int((ops.sample(logits, parameters) != reference.sample(logits, parameters)).sum())
    return count


def tie_differences() -> int:
    """Return how many choices among equal scores are not those with the lowest numbers, or out of range."""
    logits = torch.randint(3, (20, 40), generator=torch.Generator().manual_seed(0)).float()
    count = 0
    for groups in (1, 8):
        found, _ = ops.route(logits, Routing(5, groups=groups, chosen_groups=groups))
        count += int((found != logits.sort(dim=1, descending=True, stable=True).indices[:, :5]).sum())
    found, _ = ops.route(torch.full_like(logits, float("nan")), Routing(5))
    return count + int(((found < 0) | (found >= 40)).sum())


def product_differences() -> dict[str, float]:
    """Compare products with all kinds of matrices: of few rows, with and without shared columns, and of many rows."""
    found = {}
    gpu = patch.object(ops, "gpu_properties", lambda device: tiling.Gpu(2, 90))
    with gpu, patch.object(packed_products, "_compile"):
        for number, kind in enumerate(KINDS):
            few = product_error(ops, kind, 3, (70, 512), torch.float32, bias=True)
            found[f"product with kind {number}"] = few + product_error(ops, kind, 20, (30, 96), torch.float32)
        for rows in (1, 16, 40, 150):
            found[f"product of {rows} rows, float16"] = product_error(
                ops, KINDS[0], rows, (150, 576), torch.float16, bias=rows > 16
            )
        parts = random_matrix(KINDS[0], 30, 96), random_matrix(KINDS[12], 50, 96)
        rows, bias = normal(5, 96), normal(80, seed=1)
        expected = reference.linear(rows, parts, bias)
        found["product, two parts"] = relative_error(ops.linear(rows, parts, bias), expected)
    return found


def latent_differences() -> dict[str, float]:
    """Compare latent attention, absorbed and expanded, with and without divided contexts, and its rotation."""
    found = {}
    for name, case in LATENT_CASES.items():
        for dtype, fp8 in ((torch.float32, None), (torch.float16, None), (torch.float32, FP8_TYPES[0])):
            batch, options = latent_batch(case, dtype=dtype, fp8=fp8)
            expected = reference.latent_attention(*batch, **options)
            processors = patch.object(ops, "gpu_properties", lambda device: tiling.Gpu(9, 90))
            with processors, patch.object(tiling, "MIN_SPLIT_TOKENS", 256 if fp8 else 16):
                actual = ops.latent_attention(*batch, **options)
            found[f"latent {name}, {dtype}, {fp8}"] = float((actual.float() - expected.float()).abs().max())
    for dtype in (torch.float32, torch.float16):
        for interleaved in (False, True):
            for cached in (None, FP8_TYPES[0]):
                found[f"latent vectors, {interleaved}, {dtype}, {cached}"] = latent_rotary_difference(
                    ops, reference, dtype, interleaved=interleaved, cached=cached
                )
    return found


def mend_the_interpreter() -> None:
    """Triton 3.6 makes a loop's bound of an array with one element, which NumPy 2.4 no longer does by itself."""
    original = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def main() -> None:
    torch.set_num_threads(1)
    mend_the_interpreter()
    differences = {"write_kv": write_difference(), "sample": sampling_differences()}
    differences["large cache, float16"] = large_cache_difference()
    differences["random batches"], differences["replayed"] = random_difference(15), replay_difference()
    for case in SHAPES:
        differences[f"{case}, float32"] = attention_difference(case, torch.float32)
        if case.name in SPLIT:
            split = attention_difference(case, torch.float32, num_processors=9, min_split=16)
            differences[f"{case}, float32, split"] = split
    for fp8 in FP8_TYPES:
        differences[f"written {fp8}"] = fp8_writes(fp8)
        for case in SHAPES if fp8 == FP8_TYPES[0] else SHAPES[:1]:
            differences[f"{case}, {fp8}"] = attention_difference(case, torch.float32, fp8=fp8)
        split = attention_difference(SHAPES[0], torch.float32, num_processors=9, min_split=16, fp8=fp8)
        differences[f"split, {fp8}"] = split
    differences["mixed, float16"] = attention_difference(SHAPES[0], torch.float16)
    split = attention_difference(SHAPES[1], torch.float16, num_processors=9, min_split=32)
    differences["decodes, float16, split"] = split
    split = attention_difference(NARROW, torch.float16, num_processors=99, min_split=64)
    differences["narrow window, float16, split"] = split
    for dtype in (torch.float32, torch.float16):
        for name in NORM_CASES:
            differences[f"norm, {name}, {dtype}"] = norm_difference(ops, reference, name, 3, 70, dtype)
        for name in ROTARY_CASES:
            differences[f"rotary, {name}, {dtype}"] = rotary_difference(ops, reference, name, 5, dtype, dtype)
        for activation in reference.ACTIVATIONS:
            name = f"gate, {activation}, {dtype}"
            differences[name] = gate_difference(ops, reference, 2, 1100, dtype, activation)
        for name in ROUTINGS:
            differences[f"routing, {name}, {dtype}"] = routing_difference(ops, reference, name, 9, dtype)
        for name in MIXTURES:
            differences[f"experts, {name}, {dtype}"] = mixture_difference(ops, reference, name, dtype)
    for name, dtype in itertools.product(PRODUCTS, (torch.float32, torch.float16)):
        for processors in (1, 132):
            with patch.object(ops, "gpu_properties", lambda device, count=processors: tiling.Gpu(count, 90)):
                differences[f"LoRA, {name}, {processors}, {dtype}"] = lora_difference(ops, name, dtype)
    differences["LoRA, replayed"] = lora_replay_difference()
    differences["ties"] = tie_differences()
    print(json.dumps(differences | product_differences() | latent_differences()))


if __name__ == "__main__":
    main()
