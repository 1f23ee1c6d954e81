"""Gains from the scheduler's decisions, SIMULATED: the same seeded load under two settings, one table.

The cost model is a 7B-class model on an 80 GB card: 8 ms fixed (weights), 25 us per prefill token, 30 us per decoding
sequence, 40 ns per token of KV read.

python tests/bench/bench_scenarios.py
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import numpy as np
from configs import resolved
from simulated_run import LinearCost, SimulatedTimes, simulate

from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.request import Request
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.scheduler import admission
from llmsched.engine.scheduler import waiting_queue as waiting
from llmsched.engine.scheduler.baselines import make_scheduler

COST = LinearCost(8e-3, 25e-6, 30e-6, 40e-9)
BLOCK = 16
#: 8 KV heads of 128 in 32 layers, 16 bits; what PCIe 4 x16 copies in a second.
BLOCK_BYTES, COPY_RATE = 2 << 20, 20e9
EOS = 2


class SimRun:
    """One load under one setting: the times of all requests, and the scheduler's counters."""

    def __init__(
        self, requests: list[Request], num_blocks: int, lengths: dict[str, int], *, swap_blocks: int = 0, **knobs: Any
    ) -> None:
        settings = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 32768} | knobs
        settings["swap_space"] = swap_blocks * BLOCK_BYTES
        clock = VirtualClock()
        kv = KVManager(num_blocks, KVLayout(BLOCK), swap=SwapSpace(swap_blocks, BLOCK_BYTES))
        self.scheduler = make_scheduler(kv, resolved(**settings), clock)
        executor = SimulatedExecutor(
            COST, clock, lambda sequence: lengths.get(sequence.request_id), BLOCK_BYTES / COPY_RATE
        )
        self.waste: list[float] = []

        def watch(_: object) -> None:
            if len(self.scheduler.running) >= 8:
                held = sum(len(r.table) for r in self.scheduler.running) * BLOCK
                self.waste.append(1 - sum(r.num_computed_tokens for r in self.scheduler.running) / held)

        self.times = simulate(requests, self.scheduler, executor, clock, watch)
        self.duration = clock.now

    def of(self, name: str) -> list[SimulatedTimes]:
        return [t for t in self.times if t.request.request_id.startswith(name)]

    def goodput(self, ttft: float, itl: float) -> float:
        """Return requests per second with a TTFT within `ttft` and a worst gap within `itl` (seconds)."""
        return sum(t.ttft <= ttft and max(t.gaps, default=0) <= itl for t in self.times) / self.duration

    @property
    def preemption_rate(self) -> float:
        return self.scheduler.counters.num_preemptions / len(self.times)


def p(values: list[float], q: float) -> float:
    return float(np.percentile(values, q)) if values else float("nan")


def request(
    name: str, prompt: list[int], arrival: float, max_tokens: int, eos: bool = False, priority: int = 0
) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=not eos)
    return Request(name, list(prompt), len(prompt), sampling, 0, frozenset({EOS} if eos else ()), arrival, priority)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 50_000) for _ in range(length)]


def chats(rng: random.Random, count: int, rate: float) -> tuple[list[Request], dict[str, int]]:
    """Make Poisson arrivals of short prompts with log-normal outputs around 365 tokens, well below max_tokens."""
    requests, lengths, now = [], {}, 0.0
    for i in range(count):
        now += rng.expovariate(rate)
        name = f"chat{i:05}"
        requests.append(request(name, prompt(rng, rng.randrange(50, 250)), now, 2048, eos=True))
        lengths[name] = min(2048, max(4, int(rng.lognormvariate(5.9, 0.7))))
    return requests, lengths


def row(name: str, unit: str, before: tuple[str, float], after: tuple[str, float]) -> None:
    ratio = before[1] / after[1] if after[1] else float("inf")
    print(f"{name:<58} {before[0]:>16} {before[1]:>9.3f}   {after[0]:>12} {after[1]:>9.3f} {unit:<6} {ratio:>7.2f}")


def rows(name: str, unit: str, runs: dict[str, SimRun], figure: Callable[[SimRun], float]) -> None:
    row(name, unit, *((setting, figure(run)) for setting, run in runs.items()))


def crowd(**knobs: Any) -> SimRun:
    """Run 110 concurrent chats in a pool of 60 % of the KV that they hold at their end."""
    requests, lengths = chats(random.Random(1), 1200, 13.0)
    mean = sum(r.num_prompt_tokens + lengths[r.request_id] for r in requests) / len(requests)
    return SimRun(requests, int(0.6 * 110 * mean / BLOCK), lengths, **knobs)


def recomputed(run: SimRun) -> float:
    return run.scheduler.counters.recomputed_tokens / 1e3


def worst_gaps(run: SimRun) -> float:
    return p([max(t.gaps) for t in run.times], 99)


def thrash() -> None:
    """(a) Use a pool that is too small for the running requests."""
    runs = {policy: crowd(scheduling_policy=policy) for policy in ("fcfs", "fair")}
    rows("(a) thrash: preemptions per request", "", runs, lambda run: run.preemption_rate)
    rows("(a) thrash: tokens recomputed", "k", runs, recomputed)
    rows("(a) thrash: goodput at TTFT 5 s, worst gap 500 ms", "req/s", runs, lambda r: r.goodput(ttft=5.0, itl=0.5))
    rows("(a) thrash: P99 of each request's worst gap", "s", runs, worst_gaps)


def long_prompt() -> None:
    """(b) Send one prompt of 20,000 tokens among 64 chats."""

    def load() -> list[Request]:
        rng = random.Random(2)
        some = [request(f"chat{i}", prompt(rng, 300), 0.01 * i, 400) for i in range(64)]
        return [*some, request("long", prompt(rng, 20_000), 4.0, 10)]

    runs = {
        "whole steps": SimRun(load(), 20_000, {}, max_num_batched_tokens=8192, target_itl=60.0),
        "default": SimRun(load(), 20_000, {}, max_num_batched_tokens=8192),
    }

    def gaps(run: SimRun) -> list[float]:
        return [1e3 * gap for times in run.of("chat") for gap in times.gaps]

    rows("(b) 20k prompt among 64 chats: P99 ITL of the chats", "ms", runs, lambda run: p(gaps(run), 99))
    rows("(b) their longest gap", "ms", runs, lambda run: max(gaps(run)))
    rows("(b) its own TTFT", "s", runs, lambda run: run.of("long")[0].ttft)


def hit_first(requests: list[Request]) -> SimRun:
    """Order by longest prefix hit alone, as other engines do: any hit precedes any miss, however long it has waited."""
    kept = waiting.BONUS_WINDOW, waiting.ARRIVAL_QUOTA, admission.EXTRA_OFFERS
    waiting.BONUS_WINDOW, waiting.ARRIVAL_QUOTA, admission.EXTRA_OFFERS = 10**6, 0.0, 10**6
    try:
        return SimRun(requests, 20_000, {}, max_num_seqs=32, cache_bonus=1e6, max_passes=10**6, fast_lane_share=0.0)
    finally:
        waiting.BONUS_WINDOW, waiting.ARRIVAL_QUOTA, admission.EXTRA_OFFERS = kept


def cold_among_hot() -> None:
    """(c) Send cold long requests among 90 % that hit the cache."""

    def load() -> list[Request]:
        rng = random.Random(3)
        shared, requests, now = prompt(rng, 4000), [], 0.0
        for i in range(1200):
            now += rng.expovariate(28.0)
            cold = i % 10 == 9
            text = prompt(rng, 4000) if cold else shared + prompt(rng, 60)
            requests.append(request(f"{'cold' if cold else 'hot'}{i:04}", text, now, 60))
        return requests

    runs = {
        "hit first": hit_first(load()),
        "fair": SimRun(load(), 20_000, {}, max_num_seqs=32),
    }
    rows("(c) cold among 90 % hits: worst TTFT of the cold", "s", runs, lambda r: max(t.ttft for t in r.of("cold")))


def fast_lane() -> None:
    """(d) Send short requests among long prompts."""

    def load() -> list[Request]:
        rng = random.Random(4)
        requests, now = [], 0.0
        for i in range(1000):
            now += rng.expovariate(8.0)
            short = i % 2 == 0
            length = rng.randrange(20, 200) if short else rng.randrange(3000, 9000)
            requests.append(request(f"{'short' if short else 'long'}{i}", prompt(rng, length), now, 64))
        return requests

    runs = {
        "no lane": SimRun(load(), 40_000, {}, fast_lane_share=0.0),
        "lane 0.3": SimRun(load(), 40_000, {}),
    }
    for kind in ("short", "long"):
        ttfts = {name: p([t.ttft for t in run.of(kind)], 99) for name, run in runs.items()}
        row(f"(d) fast lane: P99 TTFT of the {kind} ones", "s", *ttfts.items())


def blocked_head() -> None:
    """(e) Queue small requests behind one that does not fit yet."""

    def load() -> list[Request]:
        rng = random.Random(5)
        requests = [request(f"base{i}", prompt(rng, 1500), 0.0, 500 + 100 * i) for i in range(8)]
        requests.append(request("head", prompt(rng, 9000), 0.5, 50))
        return requests + [request(f"small{i:02}", prompt(rng, 100), 0.6 + 0.05 * i, 30) for i in range(40)]

    runs = {
        "no passing": SimRun(load(), 1250, {}, max_passes=0),
        "max_passes 16": SimRun(load(), 1250, {}, max_passes=16),
    }
    small = "(e) blocked head: mean TTFT of the small ones"
    rows(small, "s", runs, lambda run: float(np.mean([t.ttft for t in run.of("small")])))
    rows("(e) blocked head: TTFT of the head itself", "s", runs, lambda run: run.of("head")[0].ttft)


def static_batches() -> None:
    """(f) Queue requests whose output lengths have a large variance, all at once."""

    def load() -> tuple[list[Request], dict[str, int]]:
        rng = random.Random(6)
        requests = [request(f"r{i:04}", prompt(rng, rng.randrange(50, 1000)), 0.0, 2048, eos=True) for i in range(400)]
        return requests, {r.request_id: min(2048, max(4, int(rng.lognormvariate(4.6, 1.2)))) for r in requests}

    blocks = 20_000
    runs = {}
    for policy in ("static", "fair"):
        requests, lengths = load()
        runs[policy] = SimRun(requests, blocks, lengths, scheduling_policy=policy, max_num_seqs=64, max_model_len=4096)
    speed = "(f) output tokens per second"
    rows(speed, "tok/s", runs, lambda run: sum(len(t.token_times) for t in run.times) / run.duration)
    rows("(f) P99 of end to end", "s", runs, lambda run: p([t.token_times[-1] for t in run.times], 99))
    rows("(f) KV waste (reserved but empty, steady state)", "%", runs, lambda run: 100 * float(np.mean(run.waste)))


def swap() -> None:
    """(g) Repeat the thrash of (a) under fcfs: recompute the lost KV, or keep it in host memory."""
    runs = {
        mode: crowd(swap_blocks=slots, scheduling_policy="fcfs", preemption_mode=mode)
        for mode, slots in (("recompute", 0), ("auto", 4096))
    }
    rows("(g) swap: tokens recomputed", "k", runs, recomputed)
    rows("(g) swap: P99 of each request's worst gap", "s", runs, worst_gaps)


def main() -> None:
    print("SIMULATED\n")
    print(f"{'':<58} {'':>16} {'':>9}   {'':>12} {'':>9} {'':<6} {'ratio':>7}")
    scenarios: list[Callable[[], None]] = [thrash, long_prompt, cold_among_hot, fast_lane, blocked_head]
    for scenario in [*scenarios, static_batches, swap]:
        scenario()


if __name__ == "__main__":
    main()
