"""Paged attention of decodes and of a prefill chunk, compared with the reference and torch's attention, MEASURED.

torch's attention gets gathered keys and values. The contenders take turns and the best time of each counts, so ratios
hold on a shared machine. The floor is the time in which torch sums as many bytes of float32 with equally warm caches.
Shapes are SmolLM2-135M's or, with --llama, Llama-3.1-8B's.

On a GPU, --programs and --stages try other settings than those with which attention is served: decode programs for each
multiprocessor, and stages of the decode kernel's pipeline.

python tests/bench/bench_kernels.py [--device cuda --llama --programs 3 --stages 4] [--dtype bfloat16] [--seconds 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from batches import Batch, Shape, make_batch

from llmsched.kernels import dispatch, reference

SMOLLM = {"heads": 9, "kv_heads": 3}
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
DECODES = [(batch, context) for context in (512, 4096) for batch in (1, 8, 32)]
SHAPES = [Shape(f"decode {b} x {c}", ((1, c),) * b, **SMOLLM) for b, c in DECODES] + [
    Shape("chunk 256 of 512", ((256, 512),), **SMOLLM),
    Shape("chunk 256 of 4096", ((256, 4096),), **SMOLLM),
    Shape("31 decodes x 512 and chunk 225", ((1, 512),) * 31 + ((225, 512),), **SMOLLM),
    Shape("decode 32k among 31 x 512", ((1, 32_768),) + ((1, 512),) * 31, **SMOLLM),
]
LARGE_DECODES = ((1, 32_768), (32, 1024), (256, 1024), (32, 8192))
LARGE_SHAPES = [Shape(f"decode {b} x {c}", ((1, c),) * b, **LLAMA) for b, c in LARGE_DECODES] + [
    Shape("decode 32k among 31 x 512", ((1, 32_768),) + ((1, 512),) * 31, **LLAMA),
    Shape("chunk 2048 of 2048", ((2048, 2048),), **LLAMA),
    Shape("chunk 256 of 32k", ((256, 32_768),), **LLAMA),
    Shape("31 decodes x 1024 and chunk 2048", ((1, 1024),) * 31 + ((2048, 2048),), **LLAMA),
]
Contender = Callable[[], object]


def gather_and_attend(batch: Batch) -> torch.Tensor:
    """Attend without a paged kernel: copy each sequence's keys and values, then call torch's attention."""
    output = torch.empty_like(batch.query)
    bounds = batch.cu_seqlens_q.tolist()
    for index, context in enumerate(batch.context_lens.tolist()):
        rows = slice(bounds[index], bounds[index + 1])
        keys, values = (
            reference.gather(cache, batch.block_tables[index], context).transpose(0, 1)
            for cache in (batch.key_cache, batch.value_cache)
        )
        queries = batch.query[rows].transpose(0, 1)
        positions = torch.arange(context, device=queries.device)
        visible = positions <= positions[context - queries.shape[1] :, None]
        output[rows] = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=visible, enable_gqa=True
        )[0].transpose(0, 1)
    return output


def best_times(contenders: dict[str, Contender], seconds: float, device: str) -> dict[str, float]:
    """Run the contenders in turn for `seconds` and return the best time of each in seconds."""

    def once(contender: Contender) -> float:
        start = time.perf_counter()
        contender()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for contender in contenders.values():
        once(contender)
    best = dict.fromkeys(contenders, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, contender in contenders.items():
            best[name] = min(best[name], once(contender))
    return best


def try_settings(programs: int | None, stages: int | None) -> None:
    """Change the settings of Triton attention that are not None."""
    from llmsched.kernels.triton import ops, tiling

    served = ops.choose_tiling

    def choose_tiling(*, decodes: bool, **shape: int) -> ops.Tiling:
        found = served(decodes=decodes, **shape)
        return found._replace(num_stages=stages) if decodes and stages else found

    ops.choose_tiling = choose_tiling
    tiling.PROGRAMS_PER_PROCESSOR = programs or tiling.PROGRAMS_PER_PROCESSOR


def measure(shape: Shape, dtype: torch.dtype, device: str, seconds: float) -> tuple[int, dict[str, float]]:
    """Return the bytes of keys and values, and each contender's time."""
    batch = make_batch(shape, dtype=dtype, device=device)
    kv_bytes = 2 * sum(c for _, c in shape.sequences) * shape.kv_heads * shape.head_dim * dtype.itemsize
    stretch, work = torch.ones(kv_bytes // 4, device=device), batch.prepare()
    contenders: dict[str, Contender] = {
        "kernel": lambda: dispatch.paged_attention(*batch.tensors, work=work, **batch.options),
        "gather": lambda: gather_and_attend(batch),
        "reference": lambda: reference.paged_attention(*batch.tensors, **batch.options),
        "floor": stretch.sum,
    }
    return kv_bytes, best_times(contenders, seconds, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--llama", action="store_true", help="shapes of Llama-3.1-8B; up to 2 GB of KV")
    parser.add_argument("--seconds", type=float, default=3.0, help="spent on each batch")
    parser.add_argument("--programs", type=int)
    parser.add_argument("--stages", type=int)
    arguments = parser.parse_args()
    if arguments.programs or arguments.stages:
        try_settings(arguments.programs, arguments.stages)
    backend = dispatch.backend_name(torch.device(arguments.device).type)
    table = Table(title=f"MEASURED: {backend} kernels, {torch.get_num_threads()} threads, ms (times the kernel's)")
    for column in ("type", "batch", "KV MB", "kernel", "GB/s", "floor", "gather + SDPA", "reference"):
        table.add_column(column, justify="right")
    for dtype in arguments.dtype:
        for shape in LARGE_SHAPES if arguments.llama else SHAPES:
            kv_bytes, times = measure(shape, getattr(torch, dtype), arguments.device, arguments.seconds)
            kernel = times.pop("kernel")
            ratios = [
                f"{1e3 * times[name]:.3f} ({times[name] / kernel:.2f})" for name in ("floor", "gather", "reference")
            ]
            speed = f"{kv_bytes / kernel / 1e9:.1f}"
            table.add_row(dtype, shape.name, f"{kv_bytes / 1e6:.1f}", f"{1e3 * kernel:.3f}", speed, *ratios)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
