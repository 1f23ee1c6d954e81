"""Kernels compared with the reference, on the device. Several processes check, so that kernels compile in parallel."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import layers
import mixtures
import torch
from batches import MIXED, SHAPES, Batch, Shape, make_batch
from latent_batches import CASES, DEEPSEEK, LatentCase, latent_batch
from packed_matrices import KINDS, product_error

from gpu_suite.rows import CheckRow, failure
from llmsched.kernels import dispatch, reference
from llmsched.kernels.fp8 import FP8_TYPES

#: Shapes as serving has them; the small ones of the kernels' own tests come on top.
SERVING = (
    Shape("32 decodes of 1k", tuple((1, 900 + 8 * i) for i in range(32)), heads=32, kv_heads=8, head_dim=128),
    Shape("a decode of 20k", ((1, 20_000),), heads=32, kv_heads=8, head_dim=128),
    Shape(
        "a decode of 32k among 31 of 500",
        ((1, 32_768), *((1, 485 + i) for i in range(31))),
        heads=32,
        kv_heads=8,
        head_dim=128,
    ),
    Shape("a prefill of 2k", ((2048, 2048),), heads=32, kv_heads=8, head_dim=128),
    Shape(
        "prefill beside decodes",
        ((700, 3000), *((1, 100 * i + 1) for i in range(16))),
        heads=14,
        kv_heads=2,
        head_dim=64,
    ),
    Shape("71 heads to one", ((40, 300), (1, 900)), heads=71, kv_heads=1, head_dim=64),
    Shape("window 128 of a long context", ((256, 3000), (1, 5000)), head_dim=64, window=128, sinks=True),
)
#: Half types differ in rounding alone, so float16 is tried where tiles differ.
HALF = ("mixed", "decodes", "head_dim 80", "head_dim 96", "head_dim 128", "head_dim 256")

#: Allowed difference of one output number. Outputs are averages of standard normal values, so they are below 4; half
#: types round the weights of the softmax and the output.
LIMITS = {torch.float32: 2e-5, torch.float16: 8 * 2**-10, torch.bfloat16: 8 * 2**-7}
#: Processes that check at the same time.
PROCESSES = 8

Check = Callable[[str], CheckRow]


def check_kernels(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Return one row for each check."""
    names = list(checks(small=small))
    if device != "cuda":
        yield from (run_check(name, device, small) for name in names)
        return
    workers = min(PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_check, name, device, small) for name in names]
        for name, future in zip(names, waiting, strict=True):
            try:
                yield future.result()
            except Exception as error:  # the process has died
                yield failure(name, error)


def run_check(name: str, device: str, small: bool) -> CheckRow:
    try:
        return checks(small=small)[name](device)
    except Exception as error:
        return failure(name, error)


def checks(*, small: bool) -> dict[str, Check]:
    """Return all checks by name. The name begins with the type of the numbers."""
    found: dict[str, Check] = {}
    for dtype in LIMITS:
        shapes = SHAPES if dtype != torch.float16 else tuple(shape for shape in SHAPES if shape.name in HALF)
        for shape in shapes[:3] if small else shapes + SERVING:
            name = f"{short(dtype)} {shape.name}"
            found[name] = lambda device, name=name, shape=shape, dtype=dtype: check_attention(  # type: ignore[misc]
                name, make_batch(shape, dtype=dtype, device=device)
            )
        for fp8 in FP8_TYPES if dtype == torch.bfloat16 else ():
            kind = str(fp8).removeprefix("torch.")
            for shape in SHAPES[:3] if small else (*(each for each in SHAPES if each.name in HALF), *SERVING):
                name = f"{short(dtype)} {shape.name}, {kind}"
                found[name] = lambda device, name=name, shape=shape, fp8=fp8: check_attention(  # type: ignore[misc]
                    name, make_batch(shape, dtype=torch.bfloat16, device=device, fp8=fp8)
                )
            name = f"{short(dtype)} write_kv, {kind}"
            found[name] = lambda device, name=name, fp8=fp8: check_write(  # type: ignore[misc]
                name, torch.bfloat16, device, fp8
            )
        serving = LatentCase(((1, 4000), (2048, 2048), (64, 9000), (1, 7)), 16, DEEPSEEK)
        cases = dict(list(CASES.items())[:2]) if small else CASES | {"DeepSeek-V2-Lite": serving}
        for case, lengths in cases.items():
            for kind in (None, *(FP8_TYPES if dtype == torch.bfloat16 else ())):
                name = f"{short(dtype)} latent attention, {case}, {kind or dtype}"
                found[name] = lambda device, name=name, lengths=lengths, dtype=dtype, kind=kind: check_latents(  # type: ignore[misc]
                    name, lengths, dtype, kind, device
                )
        name = f"{short(dtype)} write_kv"
        found[name] = lambda device, name=name, dtype=dtype: check_write(name, dtype, device)  # type: ignore[misc]
        for name, difference in {**layer_checks(dtype), **product_checks(dtype, small=small)}.items():
            found[name] = lambda device, name=name, difference=difference, dtype=dtype: check_layer(  # type: ignore[misc]
                name, difference, dtype, device
            )
    found["fp32 sample"] = check_sampling
    return found


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def check_attention(name: str, batch: Batch) -> CheckRow:
    """Compare with the reference in float32 on the same numbers."""
    query, *caches, tables, bounds, lengths = batch.tensors
    found = dispatch.paged_attention(*batch.tensors, **batch.options)
    exact = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in batch.options.items()}
    wide = caches if "kv_scales" in batch.options else [cache.float() for cache in caches]
    wanted = reference.paged_attention(query.float(), *wide, tables, bounds, lengths, **exact)
    difference = float((found.float() - wanted).abs().max())
    return compared(name, difference, LIMITS[query.dtype])


def check_latents(name: str, case: LatentCase, dtype: torch.dtype, fp8: torch.dtype | None, device: str) -> CheckRow:
    """Compare latent attention with the reference in float32 on the same numbers, relative to the largest output."""
    (query, *caches, weight, tables, bounds, lengths), options = latent_batch(case, dtype=dtype, fp8=fp8, device=device)
    found = dispatch.latent_attention(query, *caches, weight, tables, bounds, lengths, **options)
    wide = caches if fp8 is not None else [cache.float() for cache in caches]
    wanted = reference.latent_attention(query.float(), *wide, weight.float(), tables, bounds, lengths, **options)
    difference = float((found.float() - wanted).abs().max() / wanted.abs().max())
    return compared(name, difference, LIMITS[dtype])


def compared(name: str, difference: float, limit: float) -> CheckRow:
    return CheckRow(name, f"{difference:.2g}", f"<= {limit:.2g}", difference <= limit, {"difference": difference})


def check_write(name: str, dtype: torch.dtype, device: str, fp8: torch.dtype | None = None) -> CheckRow:
    """Check that exactly the numbers that the reference writes are written, with equal values."""
    shape = Shape("write", MIXED, kv_heads=3, heads=3, head_dim=80, value_dim=96)
    caches = [make_batch(shape, dtype=dtype, device=device, fp8=fp8) for _ in range(2)]
    scales = caches[0].options.get("kv_scales")
    generator = torch.Generator().manual_seed(2)
    slots = torch.randperm(caches[0].key_cache.shape[0] * shape.block_size, generator=generator)[:200]
    slots[7] = -1
    key, value = (torch.randn(200, 3, width, generator=generator).to(dtype).to(device) for width in (80, 96))
    for ops, batch in zip((dispatch, reference), caches, strict=True):
        ops.write_kv(key, value, batch.key_cache, batch.value_cache, slots.to(device), kv_scales=scales)
    equal = all(
        torch.equal(one.float().nan_to_num(7.0), other.float().nan_to_num(7.0))
        for one, other in zip(caches[0].tensors[1:3], caches[1].tensors[1:3], strict=True)
    )
    return CheckRow(name, "equal" if equal else "differs", "equal", equal)


def layer_checks(dtype: torch.dtype) -> dict[str, Callable[[Any], float]]:
    """Return functions that compare the ops between a layer's products, of a backend's module with the reference."""
    found: dict[str, Callable[[Any], float]] = {}
    for case in layers.NORM_CASES:
        found[f"{short(dtype)} norm, {case}"] = lambda ops, case=case: layers.norm_difference(  # type: ignore[misc]
            ops, reference, case, 37, 4096, dtype
        )
    for case in layers.ROTARY_CASES:
        found[f"{short(dtype)} rotary, {case}"] = lambda ops, case=case: layers.rotary_difference(  # type: ignore[misc]
            ops, reference, case, 37, dtype, dtype
        )
    for case in mixtures.ROUTINGS:
        found[f"{short(dtype)} routing, {case}"] = lambda ops, case=case: mixtures.routing_difference(  # type: ignore[misc]
            ops, reference, case, 300, dtype
        )
    for case in mixtures.MIXTURES:
        found[f"{short(dtype)} experts, {case}"] = lambda ops, case=case: mixtures.mixture_difference(  # type: ignore[misc]
            ops, reference, case, dtype
        )
    for activation in reference.ACTIVATIONS:
        found[f"{short(dtype)} {activation}"] = lambda ops, activation=activation: layers.gate_difference(  # type: ignore[misc]
            ops, reference, 37, 3000, dtype, activation
        )
    return found


def product_checks(dtype: torch.dtype, *, small: bool) -> dict[str, Callable[[Any], float]]:
    """Return functions that compare products with packed matrices of all kinds with those of the unpacked matrix."""
    shapes = [(3, (50, 96)), (40, (50, 96))] if small else [(1, (4096, 4096)), (40, (1000, 4096)), (300, (777, 1152))]
    return {
        f"{short(dtype)} product {number}, {rows} rows": lambda ops, kind=kind, rows=rows, shape=shape: product_error(  # type: ignore[misc]
            ops, kind, rows, shape, dtype, bias=rows > 1
        )
        for number, kind in enumerate(KINDS)
        for rows, shape in shapes
    }


def check_layer(name: str, difference: Callable[[Any], float], dtype: torch.dtype, device: str) -> CheckRow:
    ops = dispatch.load_backend(dispatch.backend_name(device))
    with torch.device(device):
        return compared(name, difference(ops), 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps)


def check_sampling(device: str) -> CheckRow:
    """Compare the tokens of rows with many settings. Rounding may move a few draws."""
    generator = torch.Generator().manual_seed(3)
    rows = 1024
    settings = torch.stack(
        [
            torch.tensor([0.0, 0.7, 1.0, 2.0]).repeat(rows // 4),
            torch.tensor([0.0, 5.0, 300.0, 0.0]).repeat_interleave(rows // 4),
            torch.tensor([1.0, 0.9]).repeat_interleave(2).repeat(rows // 4),
            torch.tensor([0.0, 0.05]).repeat_interleave(4).repeat(rows // 8),
        ]
    ).double()
    words = torch.randint(1 << 32, (2, rows), generator=generator).double()
    logits = (3 * torch.randn(rows, 5000, generator=generator)).to(device)
    parameters = torch.cat([settings, words]).to(device)
    differing = int((dispatch.sample(logits, parameters) != reference.sample(logits, parameters)).sum())
    return CheckRow("fp32 sample", f"{differing} of {rows} tokens differ", "<= 5", differing <= 5, {"rows": differing})
