"""Gain from freeing blocks that leave a sliding window, SIMULATED: real scheduler and KV manager, equal memory.

Each model's KV memory holds 60,000 tokens in all layers. It is served once with one block table for all layers, as if
no layer had a window, and once with one table per group of layers (full + window). Prompts have 3,000 to 12,000 tokens,
outputs 20 to 300; all arrive together. A step takes 10 ms plus 0.1 ms per prefill token and 0.02 ms per decode.

python tests/bench/bench_windows.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from configs import resolved
from fakes import make_request
from simulated_run import LinearCost, simulate

from llmsched.engine.architecture.geometry import Geometry, LayerGroup
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.kv.layout import KVLayout, group_layers
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.baselines import make_scheduler

BLOCK = 16
MEMORY = 60_000
#: Full layers, layers with a window, the window.
MODELS = {
    "gpt-oss-20b": (12, 12, 128),
    "Gemma-3-1B": (4, 22, 512),
    "Gemma-3-12B": (8, 40, 1024),
    "Gemma-3-27B": (10, 52, 1024),
    "Mistral-7B-v0.1": (0, 32, 4096),
}
COST = LinearCost(0.01, 1e-4, 2e-5, 0.0)


class WindowResult(NamedTuple):
    """Most requests that ran at once, steps, preemptions, and virtual seconds."""

    running: int
    steps: int
    preemptions: int
    seconds: float


def requests(count: int = 60) -> list[Request]:
    rng = random.Random(0)
    made = []
    for index in range(count):
        prompt = [rng.randrange(5000) for _ in range(rng.randint(3_000, 12_000))]
        made.append(make_request(f"r{index:03}", prompt, rng.randint(20, 300)))
    return made


def serve(layout: KVLayout, num_blocks: int) -> WindowResult:
    clock = VirtualClock()
    config = resolved(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=16_384)
    scheduler = make_scheduler(KVManager(num_blocks, layout), config, clock)
    seen: list[int] = []
    work = requests()
    simulate(work, scheduler, SimulatedExecutor(COST, clock), clock, lambda _: seen.append(len(scheduler.running)))
    assert all(r.num_output_tokens == r.sampling.max_tokens for r in work)
    return WindowResult(max(seen), len(seen), scheduler.counters.num_preemptions, clock.now)


def main() -> None:
    print(f"SIMULATED, KV memory for {MEMORY:,} tokens in all layers")
    print(
        f"{'model':<18}{'tables':>9}{'8k at once':>12}{'most running':>14}{'steps':>8}{'preempted':>11}{'seconds':>9}"
    )
    for name, (full, windowed, window) in MODELS.items():
        kinds = (LayerGroup("full", full, 8, 128, 128), LayerGroup("window", windowed, 8, 128, 128, window))
        found = group_layers(Geometry(tuple(k for k in kinds if k.layers), "exact", ()), BLOCK, 16_384)
        layers = found.group[0].layers
        grouped = MEMORY // BLOCK * (full + windowed) // layers
        for layout, num_blocks in ((KVLayout(BLOCK), MEMORY // BLOCK), (found.layout, grouped)):
            done = serve(layout, num_blocks)
            at_once = num_blocks // layout.num_blocks(8191)
            tables = "one" if layout == KVLayout(BLOCK) else f"{layout.full_groups} + {layout.window_groups}"
            figures = f"{at_once:>12}{done.running:>14}{done.steps:>8}{done.preemptions:>11}{done.seconds:>9.1f}"
            print(f"{name:<18}{tables:>9}{figures}")


if __name__ == "__main__":
    main()
