"""Bandwidth and products of the device, and attention alone, compared with the least time that bytes and products take.

These are measurements: only an error makes them fail. Times are medians after a warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from batches import Shape, make_batch
from latent_batches import CASES, DEEPSEEK, LatentCase, latent_batch, layer_of
from packed_matrices import KINDS, random_matrix

from gpu_suite.limits import DeviceLimits, attempt, beside, copy_bandwidth, limits_of, product_flops, timed
from gpu_suite.llama import SMALL, Size
from gpu_suite.rows import CheckRow
from llmsched.kernels import dispatch
from llmsched.kernels.experts import Gate, Routing


def measure_speed(device: str, *, small: bool) -> Iterator[CheckRow]:
    """Measure bandwidth, products, attention alone and experts alone."""
    size = SMALL if small else Size()
    copied, multiplied = copy_bandwidth(device, small), product_flops(device, small)
    limits = limits_of(device, copied, multiplied)
    bandwidth = f"{limits.bandwidth / 1e9:,.0f} GB/s ({limits.source})"
    data = {"measured": copied, "floor_uses": limits.bandwidth}
    yield CheckRow("copy bandwidth", f"{copied / 1e9:,.0f} GB/s", bandwidth, data=data)
    flops, data = f"{limits.flops / 1e12:,.1f} TFLOP/s", {"measured": multiplied, "floor_uses": limits.flops}
    yield CheckRow("bf16 products", f"{multiplied / 1e12:,.1f} TFLOP/s", flops, data=data)
    for number in (0, 6, 11, 13):  # GGUF's Q4, groups of 64 with float32 offsets, int8 and fp8 with a scale a row
        for rows in (1, 8, 16, 64, size.prefill):
            name = f"{KINDS[number].code} product in groups of {KINDS[number].group or size.hidden}, {rows} rows"
            yield attempt(
                name, lambda number=number, rows=rows, name=name: product_row(name, size, number, rows, device, limits)
            )
    for case, sequences in attention_cases(size).items():
        name = f"attention alone, {case}"
        yield attempt(name, lambda sequences=sequences, name=name: attention_row(name, size, sequences, device, limits))
    for case, sequences in attention_cases(size).items():
        name = f"latent attention alone, {case}"
        lengths = CASES["decodes"] if small else LatentCase(sequences, 16, DEEPSEEK)
        yield attempt(name, lambda lengths=lengths, name=name: latent_row(name, lengths, device, limits))
    for tokens in (4,) if small else (1, 8, 32, 128, 2048):
        name = f"experts alone, {tokens} tokens"
        yield attempt(name, lambda tokens=tokens, name=name: experts_row(name, tokens, device, limits, small=small))


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


def latent_row(name: str, case: LatentCase, device: str, limits: DeviceLimits) -> CheckRow:
    """Time one layer's latent attention, with its products.

    The floor is one read of the decodes' cache, and the fewest operations for the other tokens.
    """
    batch, options = latent_batch(case, dtype=torch.bfloat16, device=device)
    bounds, contexts = (each.cpu().numpy() for each in batch[5:])
    kv_bytes = sum(
        2 * context * (case.widths.rank + case.widths.rope) for count, context in case.sequences if count == 1
    )
    expanded = case.widths.key + case.widths.value
    flops = 0.0
    for count, context in case.sequences:
        if count > 1:
            visible = count * (context - count / 2)
            flops += 2 * case.heads * (visible * (expanded + case.widths.rope) + context * case.widths.rank * expanded)
    layer = layer_of(case, item_size=2)
    copied = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
    [work] = dispatch.prepare_attention([layer], bounds, contexts, torch.device(device), copied)
    seconds = timed(lambda: dispatch.latent_attention(*batch, work=work, **options), device, warmup=5, repeats=20)
    floor = kv_bytes / limits.bandwidth + flops / limits.flops
    return beside(name, seconds, floor, {"kv_bytes": kv_bytes, "flops": flops})


def experts_row(name: str, tokens: int, device: str, limits: DeviceLimits, *, small: bool) -> CheckRow:
    """Time the experts of a layer of Qwen3-30B-A3B, with their router. The floor is one read of the chosen experts."""
    count, chosen, hidden, inner = (8, 2, 64, 32) if small else (128, 8, 2048, 768)
    options = {"dtype": torch.bfloat16, "device": device}
    up = torch.randn(count, 2 * inner, hidden, **options) / hidden**0.5  # type: ignore[call-overload]
    down = torch.randn(count, hidden, inner, **options) / inner**0.5  # type: ignore[call-overload]
    router = torch.randn(count, hidden, **options)  # type: ignore[call-overload]
    rows = torch.randn(tokens, hidden, **options)  # type: ignore[call-overload]
    backend = dispatch.load_backend(dispatch.backend_name(torch.device(device).type))

    def run() -> torch.Tensor:
        experts, weights = backend.route(backend.linear(rows, router, None), Routing(chosen))
        output: torch.Tensor = backend.run_experts(rows, experts, weights, up, down, gate=Gate())
        return output

    experts, _ = backend.route(backend.linear(rows, router, None), Routing(chosen))
    read = len(experts.unique()) * (up[0].nbytes + down[0].nbytes)
    flops = 2 * tokens * chosen * (up[0].numel() + down[0].numel())
    seconds = timed(run, device, warmup=5, repeats=20)
    floor = max(read / limits.bandwidth, flops / limits.flops)
    return beside(name, seconds, floor, {"weight_bytes": read, "flops": flops})


def product_row(name: str, size: Size, number: int, rows: int, device: str, limits: DeviceLimits) -> CheckRow:
    """Time the product of gate and up with a packed matrix. The floor is one read of the matrix, or the products."""
    backend = dispatch.load_backend(dispatch.backend_name(device))
    with torch.device(device), torch.inference_mode():
        matrix = random_matrix(KINDS[number], 2 * size.inner, size.hidden)
        inputs = torch.randn(rows, size.hidden).to(size.dtype)
        dense = torch.randn(2 * size.inner, size.hidden).to(size.dtype)
        packed, plain = (
            timed(lambda weight=weight: backend.linear(inputs, weight, None), device, warmup=5, repeats=size.repeats)
            for weight in ((matrix,), dense)
        )
    num_bytes = sum(part.nbytes for part in matrix if part is not None)
    floor = max(num_bytes / limits.bandwidth, 2 * rows * dense.numel() / limits.flops)
    return beside(name, packed, floor, {"bytes": num_bytes, "dense_s": plain})
