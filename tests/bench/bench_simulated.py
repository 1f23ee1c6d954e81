"""Simulated against measured figures: the demo model on this machine, calibrated, under three loads.

The machine is calibrated before and after each load, and the simulation uses the mean of the two, so that drift of the
machine affects both sides alike. Loads are open loops (low, near the knee, past it) whose rates follow from the
simulated capacity; each runs ROUNDS times. The spread of the measured rounds is printed beside each error, because no
simulation can be more accurate than that. Takes under five minutes on a quiet machine.

python tests/bench/bench_simulated.py [DTYPE] [THREADS]       default: bfloat16, all cores
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.load.prompts import usable_ids
from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.engine_target import EngineTarget, running
from llmsched.cli.targets.load_run import run_workload, warm_up
from llmsched.cli.targets.simulated_target import simulate_run
from llmsched.engine.blueprint import Blueprint
from llmsched.engine.build import build_engine, engine_beside
from llmsched.engine.calibration.fit import Fit, MeasuredStep, fit
from llmsched.engine.calibration.timing import DeviceTimings, ServingOverhead, measure_engine, while_serving
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent
from llmsched.engine.provenance import Provenance

ROUNDS = 2
REPEATS = 2
REQUESTS = 80
#: Rates as shares of what the machine does at most.
LOADS = {"low": 0.4, "near the knee": 0.85, "past it": 1.6}
#: Name, how to read it, the unit, and how far off it may be.
FIGURES: tuple[tuple[str, Callable[[Measurement], float | None], str, float], ...] = (
    ("throughput", lambda m: m.rates.output_tokens, "tok/s", 0.10),
    ("P50 TTFT", lambda m: _ms(m.latency.ttft.p50), "ms", 0.20),
    ("P99 TTFT", lambda m: _ms(m.latency.ttft.p99), "ms", 0.20),
    ("P50 ITL", lambda m: _ms(m.latency.itl.p50), "ms", 0.20),
    ("P99 ITL", lambda m: _ms(m.latency.itl.p99), "ms", 0.20),
    ("P99 E2E", lambda m: _ms(m.latency.e2e.p99), "ms", 0.20),
)
#: Figures with an accuracy goal; the others are for information.
ASKED = {"throughput", "P99 TTFT", "P99 ITL"}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


class Round(NamedTuple):
    """One run of a load, and the simulated figures of the same load."""

    simulated: Measurement
    measured: Measurement


def load(rate: float | None = None) -> SyntheticLoad:
    return SyntheticLoad(
        num_prompts=REQUESTS,
        input_len=parse_lengths("32..256", "input_len"),
        output_len=parse_lengths("16..64", "output_len"),
        request_rate=rate,
        seed=11,
    )


def measured(engine: Engine, workload: SyntheticLoad) -> Measurement:
    """Run a load on a new engine with the weights that are loaded already."""

    async def run() -> Measurement:
        async with running(engine_beside(engine)) as service:
            ids, target = usable_ids(service.core.tokenizer, service.core.model.vocab_size), EngineTarget(service)
            await warm_up(target, workload, 1, ids=ids, timeout=None, output_len=4)
            await service.call(lambda core: core.prefixes.reset())
            return await run_workload(target, workload, Slo(), ids=ids, timeout=None, progress=silent)

    return asyncio.run(run())


def simulated(
    engine: Engine, before: DeviceTimings, after: DeviceTimings, workload: SyntheticLoad
) -> tuple[Measurement, Fit]:
    """Simulate the load with the cost fitted to the mean of two calibrations."""
    samples = [
        MeasuredStep(one.shape, (one.seconds + two.seconds) / 2)
        for one, two in zip(before.steps, after.steps, strict=True)
    ]
    serving = [
        ServingOverhead(one.num_seqs, (one.between + two.between) / 2, (one.slowdown + two.slowdown) / 2)
        for one, two in zip(before.serving, after.serving, strict=True)
    ]
    assert engine.plan is not None
    found = fit(samples, engine.plan.window)
    per_byte = (before.swap_seconds_per_byte + after.swap_seconds_per_byte) / 2
    blueprint = Blueprint(
        engine.config,
        engine.plan,
        while_serving(found.cost, serving),
        lambda count: count * per_byte,
        Provenance("here", measured=False, calibration_error=found.error),
    )
    return measure(simulate_run(blueprint, workload), workload, Slo()), found


def speed(one: DeviceTimings, first: DeviceTimings) -> float:
    """Return the ratio of a calibration's step times to those of the first calibration."""
    pairs = zip(one.steps, first.steps, strict=True)
    return statistics.median(sample.seconds / before.seconds for sample, before in pairs)


def show(name: str, workload: SyntheticLoad, rounds: Sequence[Round]) -> list[str]:
    """Print the rows of a load; returns what was missed."""
    print(f"\n{name}: {workload.request_rate:.2f} requests/s, {REQUESTS} requests, 32..256 tokens in, 16..64 out")
    print(f"{'':<12} {'SIMULATED':>11} {'MEASURED':>11} {'':<6} {'error':>8} {'rounds apart':>13}   asked")
    missed = []
    for figure, read, unit, limit in FIGURES:
        expected, found = mean(read, [r.simulated for r in rounds]), mean(read, [r.measured for r in rounds])
        values = [read(r.measured) or 0.0 for r in rounds]
        error, spread = expected / found - 1, (max(values) - min(values)) / found
        asked = f"within {limit:.0%}" if figure in ASKED else ""
        verdict = "MISSED" if asked and abs(error) > limit else ""
        numbers = f"{expected:>11.1f} {found:>11.1f} {unit:<6} {error:>+8.1%} {spread:>13.1%}"
        print(f"{figure:<12} {numbers}   {asked} {verdict}")
        if verdict:
            missed.append(f"{name}: {figure} is {error:+.1%} off, and the measured rounds lie {spread:.1%} apart")
    return missed


def mean(read: Callable[[Measurement], float | None], figures: Sequence[Measurement]) -> float:
    return statistics.mean(value for each in figures if (value := read(each)) is not None)


def main() -> None:
    started = time.monotonic()
    dtype: Any = sys.argv[1] if len(sys.argv) > 1 else "bfloat16"
    if len(sys.argv) > 2:
        torch.set_num_threads(int(sys.argv[2]))
    config = EngineConfig(
        model="demo",
        dtype=dtype,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=1 << 30,
        swap_space=64 << 20,
    )
    engine = build_engine(config)
    print(f"demo in {dtype} on {torch.get_num_threads()} thread(s), max_num_seqs 16, max_num_batched_tokens 256")
    before = measure_engine(engine, REPEATS)
    most = simulated(engine, before, before, load())[0].rates.requests_steady
    assert most is not None
    loads = {name: load(share * most) for name, share in LOADS.items()}
    rounds: dict[str, list[Round]] = {name: [] for name in loads}
    drift, errors = [1.0], []
    first = before
    for number in range(ROUNDS):
        for name, workload in loads.items():
            real, after = measured(engine, workload), measure_engine(engine, REPEATS)
            prediction, found = simulated(engine, before, after, workload)
            rounds[name].append(Round(prediction, real))
            drift.append(speed(after, first))
            errors.append(found.error)
            before = after
            seconds = time.monotonic() - started
            print(f"round {number + 1}, {name}: done after {seconds:.0f} s", file=sys.stderr, flush=True)
    print(f"time of the same steps in each calibration, by the first: {', '.join(f'{x:.2f}' for x in drift)}")
    missed = [each for name, workload in loads.items() for each in show(name, workload, rounds[name])]
    seconds = time.monotonic() - started
    print(f"\ncalibration error {statistics.median(errors):.1%} (median, on steps left out); {seconds:.0f} s in all")
    print("\n".join(["MISSED:", *missed] if missed else ["all within what was asked for"]))


if __name__ == "__main__":
    main()
