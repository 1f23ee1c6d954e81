"""CPU time of a step in the scheduler, by batch size and queue length, MEASURED on this machine: medians.

"update" is the time of advance() and settle(). There is no model.

In a quiet step no request arrives, ends or crosses a block boundary. In a normal step one in 16 requests crosses a
boundary. With turnover, one request ends and one arrives before each step, which is part of the time; scarce is the
same with too little memory for every max_tokens, so that the length forecast decides about admission. Last, the time to
find a prompt of 32k tokens in the prefix cache.

python tests/bench/bench_scheduler.py
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from bench_prefix import BLOCK, NUM_BLOCKS, make, median, write
from configs import resolved
from fakes import make_request

from llmsched.engine.executor.base import RowResult, StepResult
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.scheduler.baselines import make_scheduler
from llmsched.engine.scheduler.scheduler import Scheduler

STEPS = 200
LONG_PROMPT = 32_768


def loaded_scheduler(
    running: int, waiting: int, policy: str = "fair", spread: int = BLOCK, blocks_each: int = 64
) -> Scheduler:
    """Return a scheduler with max_num_seqs = `running` decoding requests and `waiting` queued ones.

    Prompt lengths differ by up to `spread` tokens. The pool has `blocks_each` blocks for each running request.
    """
    config = resolved(max_num_seqs=running, max_num_batched_tokens=8192, scheduling_policy=policy)
    kv = KVManager(running * blocks_each, KVLayout(16))
    scheduler = make_scheduler(kv, config, time.monotonic)
    for length in range(100, 400, 3):
        ended = chat("ended", length, 0.0)
        ended.token_ids += [7] * length
        ended.finish_reason = FinishReason.STOP
        scheduler.predictor.learn(ended)
    for i in range(running + waiting):
        scheduler.add(chat(f"r{i:06}", 100 + i % spread, float(i)))
    while len(scheduler.running) < running or any(r.num_output_tokens < 1 for r in scheduler.running):
        step(scheduler)
    return scheduler


def chat(name: str, prompt_len: int, arrival: float) -> Request:
    """Make a request of a class whose output lengths are learned."""
    prompt = [(int(arrival) * 31 + j) % 1000 for j in range(prompt_len)]
    request = make_request(name, prompt, 600, arrival=arrival)
    request.sampling = replace(request.sampling, ignore_eos=False)
    return request


def step(scheduler: Scheduler) -> tuple[float, float]:
    """Run one step; return the seconds of schedule() and of advance() + settle()."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter()
    result = StepResult([RowResult(token_id=7 if row.sample else None) for row in plan.rows], 0.01)
    computed = time.perf_counter()
    scheduler.advance(plan)
    scheduler.settle(plan, result)
    return planned - start, time.perf_counter() - computed


def decoding(running: int, waiting: int) -> list[tuple[float, float]]:
    scheduler = loaded_scheduler(running, waiting)
    return [step(scheduler) for _ in range(STEPS)]


def quiet(running: int, waiting: int) -> list[tuple[float, float]]:
    """Use requests of one length: one step in BLOCK crosses a boundary, and the others are measured."""
    scheduler = loaded_scheduler(running, waiting, spread=1)
    times: list[tuple[float, float]] = []
    while len(times) < STEPS:
        free, taken = scheduler.kv.pool.num_free, step(scheduler)
        if scheduler.kv.pool.num_free == free:
            times.append(taken)
    return times


def turnover(running: int, waiting: int, blocks_each: int = 64) -> list[tuple[float, float]]:
    scheduler = loaded_scheduler(running, waiting, blocks_each=blocks_each)
    times = []
    for i in range(STEPS):
        request = chat(f"s{i:06}", 100, 1e6 + i)
        start = time.perf_counter()
        scheduler.finish(scheduler.running[i * 7 % running], FinishReason.STOP)
        scheduler.add(request)
        changed = time.perf_counter() - start
        schedule, update = step(scheduler)
        times.append((changed + schedule, update))
    return times


def scarce(running: int, waiting: int) -> list[tuple[float, float]]:
    return turnover(running, waiting, blocks_each=40)


def main() -> None:
    print("aim: under 0.5 ms at 256 that decode")
    print(f"{'step':>10} {'running':>8} {'waiting':>8} {'schedule ms':>12} {'update ms':>10} {'sum ms':>8}")
    for kind in (quiet, decoding, turnover, scarce):
        sums = {}
        for running, waiting in ((32, 100), (256, 100), (256, 10_000)):
            schedule, update = (1e3 * statistics.median(part) for part in zip(*kind(running, waiting), strict=True))
            sums[running, waiting] = schedule + update
            print(f"{kind.__name__:>10} {running:>8} {waiting:>8} {schedule:>12.3f} {update:>10.3f}", end="")
            print(f" {schedule + update:>8.3f}")
        ratio = sums[256, 10_000] / sums[256, 100]
        print(f"{kind.__name__:>10}: 10,000 against 100 waiting {ratio:.2f} times (aim: under 1.5)")
    kv, prompt = KVManager(NUM_BLOCKS, KVLayout(BLOCK)), [i * 31 % 50_000 for i in range(LONG_PROMPT)]
    write(kv, make(prompt))
    print(f"prefix match of {LONG_PROMPT:,} tokens: {1e3 * median(kv.prefix_cache.find, prompt):.2f} ms (aim: under 3)")


if __name__ == "__main__":
    main()
