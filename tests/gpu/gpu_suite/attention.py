"""Kernels compared with the reference, on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from batches import MIXED, SHAPES, Batch, Shape, make_batch

from gpu_suite.rows import CheckRow, failure
from llmsched.kernels import dispatch, reference

#: Shapes as serving has them; the small ones of the kernels' own tests come on top.
SERVING = (
    Shape("32 decodes of 1k", tuple((1, 900 + 8 * i) for i in range(32)), heads=32, kv_heads=8, head_dim=128),
    Shape("a decode of 20k", ((1, 20_000),), heads=32, kv_heads=8, head_dim=128),
    Shape("a prefill of 2k", ((2048, 2048),), heads=32, kv_heads=8, head_dim=128),
    Shape(
        "prefill beside decodes",
        ((700, 3000), *((1, 100 * i + 1) for i in range(16))),
        heads=14,
        kv_heads=2,
        head_dim=64,
    ),
    Shape("window 128 of a long context", ((256, 3000), (1, 5000)), head_dim=64, window=128, sinks=True),
)
#: Half types differ in rounding alone, so float16 is tried where tiles differ.
HALF = ("mixed", "decodes", "head_dim 80", "head_dim 96", "head_dim 128", "head_dim 256")

#: Allowed difference of one output number. Outputs are averages of standard normal values, so they are below 4; half
#: types round the weights of the softmax and the output.
LIMITS = {torch.float32: 2e-5, torch.float16: 8 * 2**-10, torch.bfloat16: 8 * 2**-7}


def check_kernels(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Return one row for each shape and dtype."""
    for dtype in LIMITS:
        shapes = SHAPES if dtype != torch.float16 else tuple(shape for shape in SHAPES if shape.name in HALF)
        shapes = shapes[:3] if small else shapes + SERVING
        for shape in shapes:
            name = f"{short(dtype)} {shape.name}"
            try:
                yield check_attention(name, make_batch(shape, dtype=dtype, device=device))
            except Exception as error:
                yield failure(name, error)
    for dtype in LIMITS:
        name = f"{short(dtype)} write_kv"
        try:
            yield check_write(name, dtype, device)
        except Exception as error:
            yield failure(name, error)


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def check_attention(name: str, batch: Batch) -> CheckRow:
    """Compare with the reference in float32 on the same numbers."""
    query, keys, values, *places = batch.tensors
    found = dispatch.paged_attention(*batch.tensors, **batch.options)
    exact = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in batch.options.items()}
    wanted = reference.paged_attention(query.float(), keys.float(), values.float(), *places, **exact)
    difference = float((found.float() - wanted).abs().max())
    limit = LIMITS[query.dtype]
    return CheckRow(name, f"{difference:.2g}", f"<= {limit:.2g}", difference <= limit, {"difference": difference})


def check_write(name: str, dtype: torch.dtype, device: str) -> CheckRow:
    """Check that exactly the numbers that the reference writes are written, with equal values."""
    shape = Shape("write", MIXED, kv_heads=3, heads=3, head_dim=80, value_dim=96)
    caches = [make_batch(shape, dtype=dtype, device=device) for _ in range(2)]
    generator = torch.Generator().manual_seed(2)
    slots = torch.randperm(caches[0].key_cache.shape[0] * shape.block_size, generator=generator)[:200]
    slots[7] = -1
    key, value = (torch.randn(200, 3, width, generator=generator).to(dtype).to(device) for width in (80, 96))
    dispatch.write_kv(key, value, caches[0].key_cache, caches[0].value_cache, slots.to(device))
    reference.write_kv(key, value, caches[1].key_cache, caches[1].value_cache, slots.to(device))
    equal = all(
        torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        for one, other in zip(caches[0].tensors[1:3], caches[1].tensors[1:3], strict=True)
    )
    return CheckRow(name, "equal" if equal else "differs", "equal", equal)
