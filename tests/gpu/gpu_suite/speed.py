"""Bandwidth and products of the device, and attention alone, compared with the least time that bytes and products take.

These are measurements: only an error makes them fail. Times are medians after a warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator

from batches import Shape, make_batch

from gpu_suite.limits import DeviceLimits, attempt, beside, copy_bandwidth, limits_of, product_flops, timed
from gpu_suite.llama import SMALL, Size
from gpu_suite.rows import CheckRow
from llmsched.kernels import dispatch


def measure_speed(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Measure bandwidth, products and attention alone."""
    size = SMALL if small else Size()
    copied, multiplied = copy_bandwidth(device, small), product_flops(device, small)
    limits = limits_of(device, copied, multiplied)
    bandwidth = f"{limits.bandwidth / 1e9:,.0f} GB/s ({limits.source})"
    data = {"measured": copied, "floor_uses": limits.bandwidth}
    yield CheckRow("copy bandwidth", f"{copied / 1e9:,.0f} GB/s", bandwidth, data=data)
    flops, data = f"{limits.flops / 1e12:,.1f} TFLOP/s", {"measured": multiplied, "floor_uses": limits.flops}
    yield CheckRow("bf16 products", f"{multiplied / 1e12:,.1f} TFLOP/s", flops, data=data)
    for case, sequences in attention_cases(size).items():
        name = f"attention alone, {case}"
        yield attempt(name, lambda sequences=sequences, name=name: attention_row(name, size, sequences, device, limits))


Sequences = tuple[tuple[int, int], ...]


def attention_cases(size: Size) -> dict[str, Sequences]:
    """Return batches of (new tokens, context) with KV larger than the GPU's cache."""
    batch, context = size.many, size.context
    decodes, long, prompt = ((1, context),) * batch, ((1, context * batch),), ((size.prefill, size.prefill),)
    return {
        f"{batch} decodes of {context}": decodes,
        f"a decode of {context * batch}": long,
        f"a decode of {context * batch} among {batch - 1} of {context // 2}": ((1, context // 2),) * (batch - 1) + long,
        f"a prefill of {size.prefill}": prompt,
        f"a prefill of {size.prefill} beside {batch} decodes of {context}": decodes + prompt,
    }


def attention_row(name: str, size: Size, sequences: Sequences, device: str, limits: DeviceLimits) -> CheckRow:
    """Time one layer's attention. The floor is one read of the decodes' KV, and the products of visible keys."""
    made = make_batch(Shape(name, sequences, size.heads, size.kv_heads, size.head_dim), dtype=size.dtype, device=device)
    width, dtype_bytes = size.kv_heads * size.head_dim, size.dtype.itemsize
    kv_bytes = sum(2 * context * width * dtype_bytes for count, context in sequences if count == 1)
    visible = sum(count * (context - count / 2) for count, context in sequences if count > 1)
    flops = 4 * visible * size.heads * size.head_dim
    work = made.prepare()
    seconds = timed(
        lambda: dispatch.paged_attention(*made.tensors, work=work, **made.options),
        device,
        warmup=5,
        repeats=size.repeats,
    )
    floor = kv_bytes / limits.bandwidth + flops / limits.flops
    return beside(name, seconds, floor, {"kv_bytes": kv_bytes, "flops": flops})
