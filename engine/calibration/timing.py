"""Measurement of a device: the time of steps, the overhead of serving, and the time of copies to host memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.build import build_engine, engine_beside
from llmsched.engine.calibration.fit import Fit, MeasuredStep, fit, non_negative
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.base import ObservedExecutor, StepPlan, StepResult
from llmsched.engine.executor.cost import LINEAR, FittedCost, shape_of
from llmsched.engine.progress import Progress, silent, tracked
from llmsched.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmsched.engine.executor.torch_executor import TorchExecutor

#: Rows of a step, each a pair (context, new tokens).
Rows = tuple[tuple[int, int], ...]

#: Contexts to measure: the number of tokens, and the largest share of max_model_len that it may be.
_CONTEXTS = ((64, 1 / 8), (512, 1 / 4), (2048, 1 / 2))
#: Fewest steps from which the coefficients can be fitted.
MIN_STEPS = 12
#: Measurement of the overhead of serving: numbers of sequences, output tokens per sequence, and repeats.
_SERVED = (1, 8, 32)
_SERVED_TOKENS = 12
_REPEATS = 3
#: Settings for measuring copies if the config has no swap space, and the largest number of blocks to copy in one step.
_SWAPPING: Mapping[str, Any] = {"swap_space": 256 << 20, "preemption_mode": "auto"}
_MAX_SWAPPED = 64


class StepLimits(NamedTuple):
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int  # tokens in all KV blocks

    @property
    def max_rows(self) -> int:
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def allow(self, rows: Rows) -> bool:
        lengths = [context + tokens for context, tokens in rows]
        return (
            len(rows) <= self.max_num_seqs
            and sum(tokens for _, tokens in rows) <= self.max_num_batched_tokens
            and max(lengths) <= self.max_model_len
            and sum(lengths) <= self.kv_tokens
        )


def choose_steps(limits: StepLimits) -> dict[str, Rows]:
    """Return about twenty steps to measure, by name. Tight limits allow fewer steps."""
    short, middle, long = (max(1, min(tokens, int(share * limits.max_model_len))) for tokens, share in _CONTEXTS)
    most, largest = limits.max_rows, limits.max_num_batched_tokens
    quarter = max(1, largest // 4)
    counts = sorted({min(most, count) for count in (1, 4, 16, 64)} | {most})
    steps: list[Rows] = [((context, 1),) * count for count, context in product(counts, (short, middle, long))]
    sizes = sorted({min(16, largest), min(64, largest), quarter, max(1, largest // 2), largest})
    steps += [((0, tokens),) for tokens in sizes]
    steps += [((context, tokens),) for context, tokens in product((middle, long), (quarter, largest))]
    steps.append(((0, quarter),) * 4)
    for share, count, context in ((2, 4, middle), (1, 16, short), (4, 16, middle)):
        if largest // share > count:
            steps.append(((0, largest // share - count), *((context, 1),) * count))
    return {describe(rows): rows for rows in steps if limits.allow(rows)}


def describe(rows: Rows) -> str:
    """Return a name for a step, such as "4 decodes of 512 + prefill of 124 after 0".

    In this example, 512 and 0 are context lengths in tokens, and 124 is the number of new tokens.
    """
    decodes = [context for context, tokens in rows if tokens == 1]
    prefills = [row for row in rows if row[1] > 1]
    parts = []
    if decodes:
        parts.append(f"{len(decodes)} decode{'s' * (len(decodes) > 1)} of {decodes[0]}")
    for context, tokens in dict.fromkeys(prefills):
        times = prefills.count((context, tokens))
        parts.append(f"{f'{times} x ' if times > 1 else ''}prefill of {tokens} after {context}")
    return " + ".join(parts)


class ServingOverhead(NamedTuple):
    """Time that serving adds to steps of `num_seqs` decodes: other threads compete for the Python interpreter."""

    num_seqs: int
    between: float  # seconds from the end of a step to the start of the next step
    slowdown: float  # time of a step divided by its time when nothing is served


@dataclass(frozen=True, slots=True)
class DeviceTimings:
    engine: Engine
    steps: tuple[MeasuredStep, ...]
    serving: tuple[ServingOverhead, ...]
    fit: Fit  # fitted to `steps`
    cost: FittedCost  # `fit.cost` plus the overhead of serving
    swap_seconds_per_byte: float  # for copying KV in one direction


def measure_device(config: EngineConfig, repeats: int = 5, progress: Progress = silent) -> DeviceTimings:
    """Load a model and measure steps on its device, each step `repeats` times.

    Raises ModelError if the model cannot be loaded, and ConfigError if `config` allows too few different steps.
    """
    engine = build_engine(config if config.swap_space else replace(config, **_SWAPPING), progress)
    return measure_engine(engine, repeats, progress)


def measure_engine(engine: Engine, repeats: int = 5, progress: Progress = silent) -> DeviceTimings:
    """Measure steps of an engine. The steps overwrite the engine's KV cache."""
    executor = cast("TorchExecutor", engine.executor)
    assert engine.plan is not None
    config, window = engine.config, engine.plan.window
    limits = StepLimits(
        config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, engine.plan.num_tokens
    )
    chosen = choose_steps(limits)
    if len(chosen) < MIN_STEPS:
        raise ConfigError(
            "max_num_batched_tokens", f"there are only {len(chosen)} different steps within these limits; raise them"
        )
    plans = [executor.rehearsal(rows) for rows in chosen.values()]
    times: list[list[float]] = [[] for _ in plans]
    runs = list(zip(plans, times, strict=True)) * (repeats + 1)  # the first run of each step does not count
    for plan, found in tracked(runs, "measuring steps", progress):
        found.append(executor.execute(plan).elapsed)
    steps = tuple(
        MeasuredStep(shape_of(plan, window), statistics.median(found[1:]), name)
        for name, plan, found in zip(chosen, plans, times, strict=True)
    )
    alone = fit(steps, window)
    swap = engine.scheduler.kv.swap
    count = min(_MAX_SWAPPED, swap.num_blocks, executor.num_blocks)
    copies = executor.rehearsal([(0, 1)], num_swapped=count)
    copy_times = [executor.execute(copies).swap_elapsed for _ in range(repeats + 1)]
    per_byte = statistics.median(copy_times[1:]) / (2 * count * swap.block_bytes)
    serving = _serving_overheads(engine, limits, progress)
    return DeviceTimings(engine, steps, serving, alone, while_serving(alone.cost, serving), per_byte)


def while_serving(cost: FittedCost, serving: Sequence[ServingOverhead]) -> FittedCost:
    """Return `cost` with the overhead of serving: steps are slower, and time passes between steps."""
    matrix = np.array([[1 / each.between, each.num_seqs / each.between] for each in serving])
    per_step, per_row = non_negative(matrix).tolist()
    slowdown = max(1.0, statistics.median(each.slowdown for each in serving))
    slower = cost._replace(**{name: slowdown * getattr(cost, name) for name in LINEAR})
    return slower._replace(step=slower.step + per_step, row=slower.row + per_row)


class _ServedStep(NamedTuple):
    num_rows: int
    num_tokens: int
    elapsed: float  # seconds
    end: float  # time at which the result came


def _record(steps: list[_ServedStep], plan: StepPlan, result: StepResult) -> None:
    steps.append(_ServedStep(len(plan.rows), plan.num_tokens, result.elapsed, time.perf_counter()))


def _serving_overheads(engine: Engine, limits: StepLimits, progress: Progress) -> tuple[ServingOverhead, ...]:
    executor = cast("TorchExecutor", engine.executor)
    counts = sorted({min(count, limits.max_rows) for count in _SERVED})
    num_tokens = max(1, min(_SERVED_TOKENS, limits.max_model_len - 2))
    measured = []
    for num_seqs in tracked(counts, "serving", progress):
        plan = executor.rehearsal([(num_tokens // 2, 1)] * num_seqs)
        served, gaps, alone = [], [], []
        for _ in range(_REPEATS):
            beside = engine_beside(engine)
            steps: list[_ServedStep] = []
            beside.executor = ObservedExecutor(executor, partial(_record, steps))
            asyncio.run(_serve(AsyncEngine(beside), num_seqs, num_tokens))
            for before, after in pairwise(steps):
                if before[:2] == after[:2] == (num_seqs, num_seqs):  # all sequences decode in both steps
                    served.append(after.elapsed)
                    gaps.append(max(0.0, after.end - before.end - after.elapsed))
            alone += [executor.execute(plan).elapsed for _ in range(num_tokens)]
        if gaps:
            slowdown = statistics.median(served) / statistics.median(alone)
            measured.append(ServingOverhead(num_seqs, statistics.median(gaps), slowdown))
    if not measured:
        raise ConfigError(
            "max_model_len", f"{limits.max_model_len} tokens are too few to measure the time between steps"
        )
    return tuple(measured)


async def _serve(engine: AsyncEngine, num_seqs: int, num_tokens: int) -> None:
    engine.start()

    async def read(number: int) -> None:
        prompt = [(number * 31 + position) % engine.core.model.vocab_size for position in range(2)]
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async with engine.submit(str(number), prompt, sampling) as stream:
            async for _ in stream:
                pass

    try:
        await asyncio.gather(*(read(number) for number in range(num_seqs)))
    finally:
        await engine.stop()
