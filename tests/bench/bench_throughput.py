"""Useful output tokens per second on the demo model: the engine against transformers.generate in static batches.

The same 32 requests (prompts of 32 to 192 tokens, outputs of 8 to 48) at concurrency 1, 8 and 32. generate gets them in
padded batches of that size and runs each batch to its longest output; only requested tokens count. MEASURED, one after
the other in one run.

python tests/bench/bench_throughput.py [--model MODEL] [--dtype float32]
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from llmsched.engine import Engine, EngineConfig, SamplingParams, build_engine
from llmsched.engine.model.loader import load_config, load_model
from llmsched.engine.model.source import locate

CONCURRENCY = (1, 8, 32)
NUM_REQUESTS = 32

Work = list[tuple[list[int], int]]


def make_work(vocab_size: int) -> Work:
    rng = random.Random(0)
    return [
        ([rng.randrange(100, vocab_size) for _ in range(rng.randrange(32, 192))], rng.randrange(8, 48))
        for _ in range(NUM_REQUESTS)
    ]


def run_engine(engine: Engine, work: Work, concurrency: int) -> float:
    """Return the seconds for the work in a closed loop."""
    engine.prefixes.reset()
    pending = [(f"r{i}", *item) for i, item in enumerate(work)][::-1]
    running = 0
    start = time.perf_counter()
    while pending or running:
        while pending and running < concurrency:
            name, prompt, length = pending.pop()
            engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
            running += 1
        running -= sum(output.finished for output in engine.step())
    return time.perf_counter() - start


def run_generate(model: torch.nn.Module, work: Work, batch_size: int) -> float:
    """Return the seconds for the work in static batches."""
    start = time.perf_counter()
    for low in range(0, len(work), batch_size):
        batch = work[low : low + batch_size]
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        longest = max(length for _, length in batch)
        lengths = {"min_new_tokens": longest, "max_new_tokens": longest}
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)  # type: ignore[operator]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    options = parser.parse_args()
    engine = build_engine(EngineConfig(model=options.model, dtype=options.dtype, max_model_len=512, max_num_seqs=32))
    source = locate(options.model)
    model = load_model(
        source,
        load_config(source),
        device=engine.config.device,
        dtype=getattr(torch, engine.config.dtype),
        attn_implementation="sdpa",
    )
    work = make_work(engine.model.vocab_size)
    tokens = sum(length for _, length in work)
    run_engine(engine, work[:4], 4)
    run_generate(model, work[:4], 4)
    print(f"MEASURED: {engine.model.name} in {engine.config.dtype} on {engine.config.device}, {tokens} output tokens\n")
    print(f"{'concurrency':>11} {'llmsched tok/s':>15} {'generate tok/s':>15} {'ratio':>6}")
    for concurrency in CONCURRENCY:
        ours = tokens / run_engine(engine, work, concurrency)
        theirs = tokens / run_generate(model, work, concurrency)
        print(f"{concurrency:>11} {ours:>15.1f} {theirs:>15.1f} {ours / theirs:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
