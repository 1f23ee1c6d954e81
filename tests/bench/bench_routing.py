"""Rules that choose one of several replicas: prefix hits and TTFT on a trace with shared prefixes.

SIMULATED: an 8B model on H100s. The trace is replayed `replicas / --per` times as fast as recorded, so that each
replica gets the same load whatever their number, and every rule gets the same requests. "one cache" is the hit rate of
a single engine with the KV memory and the speed of all replicas together. Takes one to two minutes per row.

The traces are FAST25-release/traces/conversation_trace.jsonl and synthetic_trace.jsonl of kvcache-ai/Mooncake.

python tests/bench/bench_routing.py TRACE [TRACE ...] [--replicas 4 16 64] [--per 4] [--rules prefix random ...]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import RunRecord
from llmsched.cli.load.prompts import COMMON_IDS
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.targets.simulated_clients import SimulatedClients
from llmsched.cli.targets.simulated_replicas import Replication
from llmsched.cli.targets.simulated_target import make_blueprint, simulate_run
from llmsched.engine.blueprint import Blueprint
from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.cost import StepCost, StepShape
from llmsched.engine.goodput import Slo
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.routing.router import RULES
from llmsched.engine.simulated_engine import SimulatedEngine

MODEL, GPU = "meta-llama/Llama-3.1-8B-Instruct", "h100"
#: Prompts and answers together must fit the model's context of 131,072 tokens.
MAX_INPUT = 128_000


@dataclass(frozen=True)
class FasterCost:
    """Cost of steps on a device that is `times` times as fast."""

    cost: StepCost
    times: int

    @property
    def window(self) -> int | None:
        return self.cost.window

    def seconds(self, shape: StepShape) -> float:
        return self.cost.seconds(shape) / self.times


def one_cache(blueprint: Blueprint, load: TraceLoad, replicas: int) -> RunRecord:
    """Serve the load with one engine that has the KV memory and the speed of all replicas."""
    config = replace(
        blueprint.config,
        max_num_seqs=blueprint.config.max_num_seqs * replicas,
        max_num_batched_tokens=blueprint.config.max_num_batched_tokens * replicas,
    )
    kv = make_kv(config, blueprint.plan.num_blocks * replicas, None, blueprint.plan.layout)
    engine = SimulatedEngine(config, kv, FasterCost(blueprint.cost, replicas))
    planned = load.plan(COMMON_IDS)
    clients = SimulatedClients(planned, [engine], closed=False, max_concurrency=None, timeout=None)
    return RunRecord(clients.run())


def hit_rate(run: RunRecord) -> float:
    cached = sum(record.usage.cached_tokens or 0 for record in run.records)
    return cached / sum(record.usage.prompt_tokens or 0 for record in run.records)


def show(name: str, run: RunRecord, load: TraceLoad, start: float) -> None:
    figures = measure(run, load, Slo())
    ttft, itl = figures.latency.ttft, figures.latency.itl
    print(
        f"{name:14} {100 * hit_rate(run):6.1f} %  {ttft.p50 or 0:8.3f} {ttft.p99 or 0:8.3f}  "
        f"{1e3 * (itl.p99 or 0):7.1f}  {figures.requests.failed:6}  {time.perf_counter() - start:6.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--replicas", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--per", type=float, default=4.0)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    blueprint = make_blueprint(EngineConfig(model=MODEL, max_queue_size=1_000_000), GPU)
    for path in options.traces:
        trace = read_trace(path)
        if options.limit is not None:
            trace = replace(trace, requests=trace.requests[: options.limit])
        for replicas in options.replicas:
            load = TraceLoad(trace=trace, speedup=replicas / options.per, max_input_len=MAX_INPUT)
            print(f"\nSIMULATED {MODEL} on {replicas} x {GPU}: {load.describe()}")
            print(f"{'rule':14} {'prefix hits':>8}  {'P50 TTFT':>8} {'P99 TTFT':>8}  P99 ITL  failed    took")
            for rule in options.rules:
                start = time.perf_counter()
                show(rule, simulate_run(blueprint, load, replication=Replication(replicas, rule)), load, start)
            start = time.perf_counter()
            show("one cache", one_cache(blueprint, load, replicas), load, start)


if __name__ == "__main__":
    main()
