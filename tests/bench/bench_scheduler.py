"""CPU time of schedule() + update(), without a model: against the batch, and against the length of the queue.

python tests/bench/bench_scheduler.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from fakes import make_request

from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import RowResult, StepResult
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.scheduler.policies import make_scheduler
from llmsched.engine.scheduler.scheduler import Scheduler

STEPS = 200


def loaded_scheduler(running: int, waiting: int, policy: str) -> Scheduler:
    """`running` requests that decode, all slots taken, and `waiting` more."""
    config = EngineConfig(max_num_seqs=running, max_num_batched_tokens=8192, scheduling_policy=policy)  # type: ignore[arg-type]
    kv = KVManager(running * 64, 16)
    scheduler = make_scheduler(kv, config, time.monotonic)
    for i in range(running + waiting):
        prompt = [(i * 31 + j) % 1000 for j in range(100 + i % 16)]
        scheduler.add(make_request(f"r{i:06}", prompt, 600, arrival=float(i)))
    while len(scheduler.running) < running or any(r.num_output_tokens < 1 for r in scheduler.running):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """One step; seconds of schedule() and of update()."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    result = StepResult([RowResult(token_id=7 if row.sample else None) for row in plan.rows], 0.01)
    computed = time.perf_counter()
    scheduler.update(plan, result)
    return planned - start, time.perf_counter() - computed


def measure(running: int, waiting: int, policy: str = "fair") -> tuple[float, float]:
    """Median milliseconds of schedule() and update() over STEPS decode steps."""
    scheduler = loaded_scheduler(running, waiting, policy)
    times = [step(scheduler) for _ in range(STEPS)]
    schedule, update = zip(*times, strict=True)
    return 1e3 * statistics.median(schedule), 1e3 * statistics.median(update)


def main() -> None:
    print(f"{'running':>8} {'waiting':>8} {'schedule ms':>12} {'update ms':>10} {'sum ms':>8}")
    sums = {}
    for running, waiting in ((32, 100), (256, 0), (256, 100), (256, 10_000)):
        schedule, update = measure(running, waiting)
        sums[running, waiting] = schedule + update
        print(f"{running:>8} {waiting:>8} {schedule:>12.3f} {update:>10.3f} {schedule + update:>8.3f}")
    print(f"10,000 against 100 waiting: {sums[256, 10_000] / sums[256, 100]:.2f} times (aim: under 1.5)")


if __name__ == "__main__":
    main()
