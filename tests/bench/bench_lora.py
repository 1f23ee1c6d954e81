"""LoRA adapters: time of a decode step with adapters against the demo model without, MEASURED.

python tests/bench/bench_lora.py [--rounds 10] [--streams 8] [--rank 16]

One engine has no adapters, and another one has eight, of all linear layers. In each round, both compute the decodes of
the same streams: the second one without an adapter, with one adapter for all streams, and with an adapter for each
stream. Ratios are those of the medians, and of the fastest tenth of all steps, which other busy programs disturb less.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from llmsched.engine import Engine, EngineConfig, SamplingParams, build_engine
from llmsched.engine.model.loader import load_config
from llmsched.engine.model.source import locate

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from lora_files import ATTENTION, MLP, save_adapter

ADAPTERS, TOKENS, PROMPT = 8, 32, 64
numbers = count()


def decode_seconds(engine: Engine, adapters: list[str | None]) -> list[float]:
    """Serve one stream for each entry of `adapters`. Return the times of the steps in which all of them decode."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for stream, adapter in enumerate(adapters):
        engine.add_request(str(next(numbers)), [stream + 1000] * PROMPT, params, adapter=adapter)
    seconds = []
    while engine.has_work():
        start = time.perf_counter()
        outputs = engine.step()
        if sum(len(output.token_ids) for output in outputs) == len(adapters):
            seconds.append(time.perf_counter() - start)
    return seconds[1:]  # the first may compute the end of a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    settings = {"max_model_len": 256, "max_num_seqs": options.streams, "kv_cache_memory_bytes": 1 << 28}
    with tempfile.TemporaryDirectory() as root, torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(load_config(locate("demo")))
        with torch.device("cpu"):
            saved = {
                f"a{n}": save_adapter(Path(root) / f"a{n}", shapes, (*ATTENTION, *MLP), rank=options.rank, seed=n)
                for n in range(ADAPTERS)
            }
            lora = tuple(f"{name}={directory}" for name, directory in saved.items())
            plain = build_engine(EngineConfig("demo", **settings))
            adapted = build_engine(EngineConfig("demo", lora=lora, **settings))
    names = [*saved]
    cases = {
        "no adapters loaded": (plain, [None] * options.streams),
        "8 loaded, none used": (adapted, [None] * options.streams),
        "1 used by all": (adapted, [names[0]] * options.streams),
        f"{ADAPTERS} used": (adapted, [names[n % ADAPTERS] for n in range(options.streams)]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, (engine, used) in cases.items():
            seconds[name] += decode_seconds(engine, used)
    first = next(iter(seconds.values()))
    print(f"{options.streams} streams, rank {options.rank}, {adapted.config.dtype}, load {os.getloadavg()[0]:.1f}")
    for name, found in seconds.items():
        half, tenth = (np.percentile(found, share) / np.percentile(first, share) for share in (50, 10))
        print(f"{name:20} median {1000 * np.median(found):6.1f} ms, ratio {half:.2f}; fastest tenth: ratio {tenth:.2f}")


if __name__ == "__main__":
    main()
