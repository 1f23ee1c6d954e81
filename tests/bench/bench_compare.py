"""Static batches against continuous batching on output lengths with a large variance, MEASURED (`bench --compare`).

The demo model in this process serves 32 requests that arrive together, 8 at a time: prompts of 32 to 192 tokens,
outputs log-normal with a mean of 64 and a sigma of 1, cut at 320. static reserves KV for max_model_len (512) for each
member of a batch and ends a batch with its longest member. Two interleaved rounds each; on a shared machine only
ratios are meaningful. Takes about three minutes on one thread.

python tests/bench/bench_compare.py [THREADS]        default: 1
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import torch

from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.modes import bench_compare
from llmsched.cli.bench.report.report_content import show
from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.interface import RunPlan
from llmsched.engine.config import EngineConfig
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent

LOAD = SyntheticLoad(
    num_prompts=32,
    input_len=parse_lengths("32..192", "input_len"),
    output_len=parse_lengths("lognormal:64,1.0,320", "output_len"),
)
ENGINE: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "device": "cpu", "kv_cache_memory_bytes": 1 << 30}


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    started = time.monotonic()
    plan = RunPlan(LOAD, Slo(), timeout=600, warmup=1)
    modes = ModeFlags(compare="static, continuous")
    result = asyncio.run(bench_compare(EngineConfig("demo", **ENGINE), ENGINE, None, modes, plan, silent))
    show(result.content)
    print(f"\n{torch.get_num_threads()} thread(s), in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
