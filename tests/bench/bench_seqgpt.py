"""Scenario seqgpt, MEASURED: BLOOM-560M with random weights, 24 clients, outputs of 16 to 512 tokens, a system prompt.

Compares static batching, which reserves KV for 2,048 tokens a request and has no prefix cache, with this engine at its
defaults: peak memory, throughput, P95 per-token latency, first-token latency. Each client sends its next request when
it has the output of the previous one. Random weights do not change times or memory.

--scale 0.25 (the default) uses a quarter of all lengths and of the reservation, to take a few minutes on two slow
cores; weights are then a larger share of the memory, which reduces the saving. --scale 1 is the full scenario and takes
four times as long and 7 GiB of memory. Unless it is measured, it follows SIMULATED on an NVIDIA L4: the scheduler and
KV manager are real, so block counts are exact, and only step times are modelled.

python tests/bench/bench_seqgpt.py [--scale 0.25] [--requests 72] [--rounds 1] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from typing import Any

import torch
from tiny_models import build_tokenizer
from transformers import BloomConfig, BloomForCausalLM

from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.modes import bench_compare
from llmsched.cli.bench.report.report_content import show
from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.render import human_bytes
from llmsched.cli.targets.interface import RunPlan
from llmsched.engine.config import EngineConfig
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent

CLIENTS = 24
RESERVED, SYSTEM_PROMPT, QUESTION, SHORTEST, LONGEST = 2048, 256, 64, 16, 512
#: 24 layers, keys and values of 1,024 numbers in 16 bits.
KV_BYTES_PER_TOKEN = 24 * 2 * 1024 * 2


def write_model(directory: Path) -> None:
    """Write a model of bigscience/bloom-560m's shape in bfloat16, and a tokenizer to make prompts with."""
    torch.manual_seed(0)
    shape = {"vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24, "n_head": 16, "seq_length": RESERVED}
    BloomForCausalLM(BloomConfig.from_dict(shape)).bfloat16().save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def compare(model: str, scale: float, simulate: str | None, options: argparse.Namespace) -> None:
    """Run the scenario with lengths of this scale and print the results."""

    def scaled(tokens: int) -> int:
        return max(1, round(tokens * scale))

    load = SyntheticLoad(
        num_prompts=options.requests,
        input_len=scaled(SYSTEM_PROMPT + QUESTION),
        output_len=parse_lengths(f"{scaled(SHORTEST)}..{scaled(LONGEST)}", "output_len"),
        prefix_len=scaled(SYSTEM_PROMPT),
        max_concurrency=CLIENTS,
    )
    engine: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_num_seqs": CLIENTS,
        "max_model_len": scaled(RESERVED),
        "kv_cache_memory_bytes": (CLIENTS * (scaled(RESERVED) + 16) + 64) * KV_BYTES_PER_TOKEN,
        "device": "auto" if simulate else "cpu",
    }
    print(f"{load.describe_requests()}, {load.prefix_len} of them the system prompt; {load.describe()}")
    print(f"static reserves KV for {scaled(RESERVED)} tokens a request", flush=True)
    modes = ModeFlags(compare="static enable_prefix_caching=off, continuous", rounds=options.rounds)
    plan = RunPlan(load, Slo(), timeout=3600, warmup=None)
    result = asyncio.run(bench_compare(EngineConfig(model, **engine), engine, simulate, modes, plan, silent))
    show(result.content)
    static, ours = (run["peak_memory_bytes"] for run in result.report["runs"])
    print(f"peak memory {human_bytes(static)} -> {human_bytes(ours)}: {1 - ours / static:.0%} less\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=3 * CLIENTS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "bloom-560m-random"
        write_model(model)
        compare(str(model), options.scale, None, options)
        if options.scale != 1:
            compare(str(model), 1, "l4", options)
    print(f"{options.threads} thread(s), in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
