"""Gains from the scheduler's decisions on a real model, MEASURED: the demo model on the CPU, two settings interleaved.

Each setting runs ROUNDS times, in turn, so that other work on the machine affects both; only ratios within a run are
meaningful. Figures pool all rounds. Arrival rates, and the target of (b), follow from the machine's speed, which is
measured first, so the scenarios are equally hard on a slow machine. Takes about five minutes on one thread.

python tests/bench/bench_measured.py [THREADS]        default: 1; more threads are slower on a shared machine
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.sampling_params import SamplingParams

ROUNDS = 2
#: Token ids that are words of the demo model.
IDS = range(300, 40_000)


@dataclass(frozen=True)
class TimedRequest:
    """Request: its arrival in seconds after the start, its prompt, and its number of output tokens."""

    name: str
    arrival: float
    prompt: list[int]
    max_tokens: int


@dataclass
class Times:
    """Due time of a request and the times of its tokens, in seconds of one clock."""

    name: str
    arrival: float
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival

    @property
    def e2e(self) -> float:
        return self.tokens[-1] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


@dataclass
class SettingResults:
    """Results of all rounds of one setting."""

    times: list[Times] = field(default_factory=list)
    seconds: float = 0.0
    waste: list[float] = field(default_factory=list)

    def of(self, name: str) -> list[Times]:
        return [times for times in self.times if times.name.startswith(name)]


class Bench:
    """One loaded model; every run gets a new engine with an empty cache around it."""

    def __init__(self) -> None:
        config = EngineConfig(
            model="demo", device="cpu", max_num_batched_tokens=1024, max_num_seqs=16, kv_cache_memory_bytes=1 << 30
        )
        self.built = build_engine(config)

    def engine(self, **knobs: Any) -> Engine:
        built = self.built
        config = replace(built.config, **knobs)
        kv = make_kv(config, built.scheduler.kv.pool.num_blocks)
        return Engine(config, built.model, built.tokenizer, built.executor, kv)

    def run(self, loads: list[TimedRequest], outcome: SettingResults, **knobs: Any) -> None:
        """Serve the loads, each from its arrival on."""
        engine, start = self.engine(**knobs), time.monotonic()
        times = {load.name: Times(load.name, start + load.arrival) for load in loads}
        pending = sorted(loads, key=lambda load: load.arrival, reverse=True)
        while pending or engine.has_work():
            if not engine.has_work():
                time.sleep(max(0.0, start + pending[-1].arrival - time.monotonic()))
            while pending and start + pending[-1].arrival <= time.monotonic():
                load = pending.pop()
                sampling = SamplingParams(temperature=0, max_tokens=load.max_tokens, ignore_eos=True)
                engine.add_request(load.name, load.prompt, sampling, arrival_time=start + load.arrival)
            for output in engine.step():
                times[output.request_id].tokens += [time.monotonic()] * len(output.token_ids)
            self.note_waste(engine, outcome)
        outcome.times += times.values()
        outcome.seconds += time.monotonic() - start

    def seconds(self, loads: list[TimedRequest], **knobs: Any) -> float:
        """Return the time in which the loads, sent together, are served: the best of two runs after a warm-up."""
        outcomes = [SettingResults() for _ in range(3)]
        for outcome in outcomes:
            self.run(loads, outcome, **knobs)
        return min(outcome.seconds for outcome in outcomes[1:])

    def note_waste(self, engine: Engine, outcome: SettingResults) -> None:
        running = engine.scheduler.running
        if len(running) >= 4:
            held = sum(len(request.table) for request in running) * engine.config.block_size
            outcome.waste.append(1 - sum(request.num_computed_tokens for request in running) / held)

    def compare(
        self, make: Callable[[], list[TimedRequest]], settings: dict[str, dict[str, Any]]
    ) -> dict[str, SettingResults]:
        outcomes = {name: SettingResults() for name in settings}
        for _ in range(ROUNDS):
            for name, knobs in settings.items():
                self.run(make(), outcomes[name], **knobs)
        return outcomes


def prompt(rng: random.Random, length: int) -> list[int]:
    return rng.choices(IDS, k=length)


def p(values: list[float], q: float) -> float:
    return float(np.percentile(values, q))


def row(name: str, unit: str, before: tuple[str, float], after: tuple[str, float]) -> None:
    ratio = before[1] / after[1] if after[1] else float("inf")
    print(
        f"{name:<58} {before[0]:>16} {before[1]:>9.3f}   {after[0]:>14} {after[1]:>9.3f} {unit:<6} {ratio:>7.2f}",
        flush=True,
    )


def rows(name: str, unit: str, outcomes: dict[str, SettingResults], figure: Callable[[SettingResults], float]) -> None:
    before, after = ((setting, figure(outcome)) for setting, outcome in outcomes.items())
    row(name, unit, before, after)


def long_prompt(bench: Bench) -> None:
    """(b) Send one prompt of 3,000 tokens among 8 chats, a quarter through. Whole steps have 1,024 tokens."""

    def chats(max_tokens: int) -> list[TimedRequest]:
        rng = random.Random(2)
        return [TimedRequest(f"chat{i}", 0.0, prompt(rng, 60), max_tokens) for i in range(8)]

    short, whole = bench.seconds(chats(8)), bench.seconds(chats(40))
    step = (whole - short) / 32

    def load() -> list[TimedRequest]:
        return [*chats(120), TimedRequest("long", short + 30 * step, prompt(random.Random(3), 3000), 4)]

    settings: dict[str, dict[str, Any]] = {"whole steps": {"target_itl": 60.0}, "default": {}}
    outcomes = bench.compare(load, settings)
    rows(
        "(b) 3k prompt among 8 chats: P99 ITL of the chats",
        "ms",
        outcomes,
        lambda o: 1e3 * p([gap for times in o.of("chat") for gap in times.gaps], 99),
    )
    rows("(b) their longest gap", "ms", outcomes, lambda o: 1e3 * max(max(times.gaps) for times in o.of("chat")))
    rows("(b) its own TTFT", "s", outcomes, lambda o: float(np.mean([times.ttft for times in o.of("long")])))


def fast_lane(bench: Bench) -> None:
    """(d) Send short requests among long prompts that arrive 1.25 times as fast as they can be computed."""
    common: dict[str, Any] = {"max_num_batched_tokens": 256}
    rng = random.Random(5)
    one_long = bench.seconds([TimedRequest(f"long{i}", 0.0, prompt(rng, 900), 8) for i in range(2)], **common) / 2
    gap = one_long / 1.25

    def load() -> list[TimedRequest]:
        rng = random.Random(4)
        long = [TimedRequest(f"long{i}", gap * i, prompt(rng, 900), 8) for i in range(12)]
        return [*long, *(TimedRequest(f"short{i}", gap * (i + 0.5), prompt(rng, 30), 8) for i in range(12))]

    settings = {"no lane": common | {"fast_lane_share": 0.0}, "lane 0.3": common}
    outcomes = bench.compare(load, settings)
    for name in ("short", "long"):
        rows(f"(d) P99 TTFT of the {name} ones", "s", outcomes, lambda o, n=name: p([t.ttft for t in o.of(n)], 99))  # type: ignore[misc]


def static_batches(bench: Bench) -> None:
    """(f) Queue requests whose output lengths have a large variance, all at once."""

    def load() -> list[TimedRequest]:
        rng = random.Random(6)
        lengths = [min(160, max(4, int(rng.lognormvariate(3.4, 1.0)))) for _ in range(24)]
        return [TimedRequest(f"r{i:02}", 0.0, prompt(rng, rng.randrange(30, 150)), n) for i, n in enumerate(lengths)]

    common = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
    settings = {name: common | {"scheduling_policy": name} for name in ("static", "fair")}
    outcomes = bench.compare(load, settings)
    rows(
        "(f) output tokens per second",
        "tok/s",
        outcomes,
        lambda o: sum(len(times.tokens) for times in o.times) / o.seconds,
    )
    rows("(f) P99 of end to end", "s", outcomes, lambda o: p([times.e2e for times in o.times], 99))
    rows("(f) KV waste (reserved but empty)", "%", outcomes, lambda o: 100 * float(np.mean(o.waste)))


def prefix_hit(bench: Bench) -> None:
    """Compare the TTFT of a prompt of 2,000 tokens, 1,900 of them cached, with that of a new prompt."""
    rng = random.Random(7)
    outcomes = {"miss": SettingResults(), "hit": SettingResults()}
    engine = bench.engine()
    for number in range(2 * ROUNDS + 1):
        shared = prompt(rng, 1900)
        for name, outcome in outcomes.items():
            times = Times(name, time.monotonic())
            engine.add_request(
                f"{name}{number}", [*shared, *prompt(rng, 100)], SamplingParams(temperature=0, max_tokens=1)
            )
            while engine.has_work():
                for output in engine.step():
                    times.tokens.append(time.monotonic())
                    assert output.num_cached_tokens == (0 if name == "miss" else 1900)
            outcome.times.append(times)
    rows("TTFT, 1,900 of 2,000 tokens cached", "s", outcomes, lambda o: p([times.ttft for times in o.times], 50))


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    started, bench = time.monotonic(), Bench()
    config = bench.built.config
    print(
        f"MEASURED: {bench.built.model.name}, {config.dtype} on {config.device}, {torch.get_num_threads()} thread(s)\n"
    )
    print(f"{'':<58} {'':>16} {'':>9}   {'':>14} {'':>9} {'':<6} {'ratio':>7}")
    for scenario in (long_prompt, fast_lane, static_batches, prefix_hit):
        scenario(bench)
    print(f"\nin {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
