"""Share of the sampler in a decode step of the demo model on the CPU, by batch size and sampling parameters, MEASURED.

python tests/bench/bench_sampler.py [--seconds 3]

The forward pass (256 tokens of context, bfloat16) and the sampler take turns on real logits, and the best time of each
counts. The last columns are the sampler's times for a vocabulary of 128,256, on logits with a normal distribution.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.sampler import Sampler
from llmsched.engine.request import Sequence
from llmsched.engine.sampling_params import SamplingParams

BATCHES, LARGE_VOCABULARY = (1, 8, 32, 128), 128_256
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1.0),
    "top_p": SamplingParams(temperature=1.0, top_p=0.95),
    "top_k": SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
}


def best_times(contenders: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Run the contenders in turn, at least 3 times, and return the best time of each in seconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(times))]) < 3:
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            times[name].append(time.perf_counter() - start)
    return {name: min(found) for name, found in times.items()}


def sample(logits: torch.Tensor, rows: list[Sequence]) -> None:
    Sampler().enqueue(logits, rows).collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3)
    seconds = parser.parse_args().seconds
    config = EngineConfig("demo", dtype="bfloat16", device="cpu", max_model_len=512, kv_cache_memory_bytes=1 << 30)
    executor = build_engine(config).executor
    table = Table("batch", "forward ms", *SAMPLINGS, *(f"{name}, 128k" for name in SAMPLINGS))
    generator = torch.Generator().manual_seed(0)
    for batch in BATCHES:
        forward = partial(executor.logits, executor.rehearsal([(256, 1)] * batch).rows)
        large = (torch.randn(batch, LARGE_VOCABULARY, generator=generator) * 2.5).bfloat16()
        with torch.inference_mode():
            contenders: dict[str, Callable[[], object]] = {"forward": forward}
            for suffix, logits in (("", forward()), (", 128k", large)):
                for name, sampling in SAMPLINGS.items():
                    rows = [Sequence(str(row), [0], 1, sampling, row, frozenset()) for row in range(batch)]
                    contenders[name + suffix] = partial(sample, logits, rows)
            times = best_times(contenders, seconds)
        step = times.pop("forward")
        cells = (f"{t * 1e3:.2f} ms" + ("" if "128k" in name else f" {t / step:.1%}") for name, t in times.items())
        table.add_row(str(batch), f"{step * 1e3:.1f}", *cells)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
