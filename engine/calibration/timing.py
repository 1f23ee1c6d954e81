"""Timing of a device: steps, the overhead of serving, and copies to host memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from llmsched.engine.build import build_engine, engine_beside
from llmsched.engine.calibration.fit import Fit, MeasuredStep, fit, non_negative
from llmsched.engine.calibration.sample_steps import StepLimits, choose_steps
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.base import Executor, StepPlan, StepResult
from llmsched.engine.executor.cost import LINEAR, FittedCost, shape_of
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.progress import Progress, silent, tracked
from llmsched.engine.request import SamplingParams
from llmsched.engine.service import AsyncEngine

if TYPE_CHECKING:
    from llmsched.engine.executor.torch_executor import TorchExecutor

#: Fewest steps from which the coefficients can be fitted.
MIN_STEPS = 12
#: Numbers of sequences served together to measure the overhead, tokens of each, and repeats.
_SERVED = (1, 8, 32)
_SERVED_TOKENS = 12
_REPEATS = 3
#: Host memory for the measured copies if the config has none, and the most blocks copied in one step.
_SWAPPING: Mapping[str, Any] = {"swap_space": 256 << 20, "preemption_mode": "auto"}
_MAX_SWAPPED = 64


class ServingOverhead(NamedTuple):
    """Overhead of serving while `num_seqs` sequences decode.

    `between` is the time in seconds from the end of a step to the start of the next. `slowdown` is the time of a step
    divided by that of the same step alone: other threads compete for the interpreter.
    """

    num_seqs: int
    between: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class DeviceTimings:
    """Timings of `engine` on its device.

    `fit` is the cost of the `steps` alone, `cost` includes the overhead of serving. `swap_seconds_per_byte` is for
    copying KV in one direction.
    """

    engine: Engine
    steps: tuple[MeasuredStep, ...]
    serving: tuple[ServingOverhead, ...]
    fit: Fit
    cost: FittedCost
    swap_seconds_per_byte: float


def measure_device(config: EngineConfig, repeats: int = 5, progress: Progress = silent) -> DeviceTimings:
    """Load the model and time its steps. The steps take turns, so that other load on the machine affects all alike.

    Raises ModelError, and ConfigError if the engine's limits allow too few different steps.
    """
    engine = build_engine(config if config.swap_space else replace(config, **_SWAPPING), progress)
    return measure_engine(engine, repeats, progress)


def measure_engine(engine: Engine, repeats: int = 5, progress: Progress = silent) -> DeviceTimings:
    """Time the steps of an engine, as measure_device does. Afterwards it may be used only through `engine_beside`."""
    executor = cast("TorchExecutor", engine.executor)
    assert engine.plan is not None
    chosen = choose_steps(_limits(engine))
    if len(chosen) < MIN_STEPS:
        raise ConfigError(
            "max_num_batched_tokens", f"there are only {len(chosen)} different steps within these limits; raise them"
        )
    plans = [executor.rehearsal(rows) for rows in chosen.values()]
    times = _time_steps(executor, plans, repeats, progress)
    steps = tuple(
        MeasuredStep(shape_of(plan, engine.plan.window), seconds, name)
        for name, plan, seconds in zip(chosen, plans, times, strict=True)
    )
    alone = fit(steps, engine.plan.window)
    swap = _time_copies(executor, engine.scheduler.kv.swap, repeats)
    serving = _serving_overheads(engine, progress)
    return DeviceTimings(engine, steps, serving, alone, while_serving(alone.cost, serving), swap)


def _limits(engine: Engine) -> StepLimits:
    config, plan = engine.config, engine.plan
    assert plan is not None
    return StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, plan.num_tokens)


def _time_steps(executor: Executor, plans: Sequence[StepPlan], repeats: int, progress: Progress) -> list[float]:
    """Return the median time of each step in seconds, over `repeats` runs after a first run that does not count."""
    times: list[list[float]] = [[] for _ in plans]
    runs = list(zip(plans, times, strict=True)) * (repeats + 1)
    for plan, found in tracked(runs, "measuring steps", progress):
        found.append(executor.execute(plan).elapsed)
    return [statistics.median(found[1:]) for found in times]


def _time_copies(executor: TorchExecutor, swap: SwapSpace, repeats: int) -> float:
    """Return the seconds per byte of a copy from or to host memory."""
    count = min(_MAX_SWAPPED, swap.num_blocks, executor.num_blocks)
    plan = executor.rehearsal([(0, 1)], num_swapped=count)
    times = [executor.execute(plan).swap_elapsed for _ in range(repeats + 1)]
    return statistics.median(times[1:]) / (2 * count * swap.block_bytes)


def while_serving(cost: FittedCost, serving: Sequence[ServingOverhead]) -> FittedCost:
    """Return the cost of a step while requests are served, including the time until the next step starts."""
    matrix = np.array([[1 / each.between, each.num_seqs / each.between] for each in serving])
    per_step, per_row = non_negative(matrix).tolist()
    slowdown = max(1.0, statistics.median(each.slowdown for each in serving))
    slower = cost._replace(**{name: slowdown * getattr(cost, name) for name in LINEAR})
    return slower._replace(step=slower.step + per_step, row=slower.row + per_row)


class _RecordingExecutor:
    """Executor that records each step: number of rows and of tokens, start and end in seconds."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[tuple[int, int, float, float]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        result = self._executor.execute(plan)
        self.steps.append((len(plan.rows), plan.num_tokens, start, time.perf_counter()))
        return result

    def decode_steps(self, num_seqs: int) -> list[tuple[float, float]]:
        """Return the time of each step of `num_seqs` decodes that another such step follows, and the gap to it."""
        wanted = (num_seqs, num_seqs)
        return [
            (before[3] - before[2], after[2] - before[3])
            for before, after in pairwise(self.steps)
            if before[:2] == after[:2] == wanted
        ]


def _serving_overheads(engine: Engine, progress: Progress) -> tuple[ServingOverhead, ...]:
    """Measure what scheduling, detokenising and streaming add to steps, for several numbers of sequences."""
    limits = _limits(engine)
    counts = sorted({min(count, limits.max_rows) for count in _SERVED})
    num_tokens = max(1, min(_SERVED_TOKENS, limits.max_model_len - 2))
    found = [_serving_overhead(engine, count, num_tokens) for count in tracked(counts, "serving", progress)]
    if not (measured := tuple(each for each in found if each is not None)):
        raise ConfigError(
            "max_model_len", f"{limits.max_model_len} tokens are too few to measure the time between steps"
        )
    return measured


def _serving_overhead(engine: Engine, num_seqs: int, num_tokens: int) -> ServingOverhead | None:
    """Serve `num_seqs` sequences and run the same steps alone, in turns; compare the medians.

    Returns None if no two consecutive steps had all the sequences.
    """
    executor = cast("TorchExecutor", engine.executor)
    plan = executor.rehearsal([(num_tokens // 2, 1)] * num_seqs)
    served, gaps, alone = [], [], []
    for _ in range(_REPEATS):
        beside = engine_beside(engine)
        recorder = beside.executor = _RecordingExecutor(executor)
        asyncio.run(_serve(AsyncEngine(beside), num_seqs, num_tokens))
        for seconds, gap in recorder.decode_steps(num_seqs):
            served.append(seconds)
            gaps.append(gap)
        alone += [executor.execute(plan).elapsed for _ in range(num_tokens)]
    if not gaps:
        return None
    return ServingOverhead(num_seqs, statistics.median(gaps), statistics.median(served) / statistics.median(alone))


async def _serve(engine: AsyncEngine, num_seqs: int, num_tokens: int) -> None:
    """Serve `num_seqs` requests together, each with its own reader."""
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
