"""Measuring a device: the time of steps, what serving adds to it, and the time of copies to host memory."""

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
from llmsched.engine.calibration.fit import Fit, Sample, fit, non_negative
from llmsched.engine.calibration.sample_steps import Room, Rows, choose_steps
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.base import Executor, StepPlan, StepResult
from llmsched.engine.executor.cost import LINEAR, FittedCost, shape_of
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.progress import Progress, silent
from llmsched.engine.request import SamplingParams
from llmsched.engine.service import AsyncEngine

if TYPE_CHECKING:
    from llmsched.engine.executor.torch_executor import TorchExecutor

#: Steps that are needed for the coefficients to mean anything.
MIN_STEPS = 12
#: Sequences that are served at a time to see what that takes, for how many tokens, and how often in turn with the
#: same steps alone.
_SERVED = (1, 8, 32)
_SERVED_TOKENS = 12
_TURNS = 3
#: Host memory for the copies that are measured, where none is asked for, and blocks that are copied at a time.
_SWAPPING: Mapping[str, Any] = {"swap_space": 256 << 20, "preemption_mode": "auto"}
_MOST_SWAPPED = 64


class Serving(NamedTuple):
    """What serving adds while `num_seqs` sequences decode.

    `between` are the seconds from the end of a step to the start of the next, `slowdown` is how many times as long a
    step takes as alone, since other threads want the interpreter.
    """

    num_seqs: int
    between: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was measured: its name and rows, and the median of its times in seconds."""

    name: str
    rows: Rows
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of `engine`, and what follows from it.

    `fit` is to the `samples` of the steps alone, in their order; `cost` adds what serving does to them.
    `swap_seconds_per_byte` is for copying KV in one direction.
    """

    engine: Engine
    steps: tuple[Step, ...]
    samples: tuple[Sample, ...]
    serving: tuple[Serving, ...]
    fit: Fit
    cost: FittedCost
    swap_seconds_per_byte: float


def measure_device(config: EngineConfig, repeats: int = 5, progress: Progress = silent) -> Measured:
    """Load the model and measure it. Raises ModelError, and ConfigError also where the limits are too tight to learn.

    The steps are run in turn, `repeats` times over, so that what else the machine does falls on all alike.
    """
    engine = build_engine(config if config.swap_space else replace(config, **_SWAPPING), progress)
    return measure_engine(engine, repeats, progress)


def measure_engine(engine: Engine, repeats: int = 5, progress: Progress = silent) -> Measured:
    """As measure_device, for an engine that has been built; afterwards only `engine_beside` may be made of it."""
    executor = cast("TorchExecutor", engine.executor)
    assert engine.plan is not None
    steps = choose_steps(_room(engine))
    if len(steps) < MIN_STEPS:
        raise ConfigError(
            "max_num_batched_tokens", f"there are only {len(steps)} different steps within these limits; raise them"
        )
    plans = [executor.rehearsal(rows) for rows in steps.values()]
    seconds = _measure(executor, plans, repeats, progress)
    shapes = [shape_of(plan, engine.plan.window) for plan in plans]
    samples = tuple(Sample(shape, time) for shape, time in zip(shapes, seconds, strict=True))
    found = fit(samples, engine.plan.window)
    swap = _copying(executor, engine.scheduler.kv.swap, repeats)
    serving = _serving(engine, progress)
    measured = [Step(name, rows, time) for (name, rows), time in zip(steps.items(), seconds, strict=True)]
    return Measured(engine, tuple(measured), samples, serving, found, while_serving(found.cost, serving), swap)


def _room(engine: Engine) -> Room:
    config, plan = engine.config, engine.plan
    assert plan is not None
    return Room(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len, plan.num_tokens)


def _measure(executor: Executor, plans: Sequence[StepPlan], repeats: int, progress: Progress) -> list[float]:
    """The median time of each step over the repeats; one more before them does not count."""
    times: list[list[float]] = [[] for _ in plans]
    done, total = 0, (repeats + 1) * len(plans)
    for _ in range(repeats + 1):
        for plan, found in zip(plans, times, strict=True):
            found.append(executor.execute(plan).elapsed)
            done += 1
            progress("measuring steps", done, total)
    return [statistics.median(found[1:]) for found in times]


def _copying(executor: TorchExecutor, swap: SwapSpace, repeats: int) -> float:
    """Seconds per byte of a copy from or to host memory."""
    count = min(_MOST_SWAPPED, swap.num_blocks, executor.num_blocks)
    plan = executor.rehearsal([(0, 1)], num_swapped=count)
    times = [executor.execute(plan).swap_elapsed for _ in range(repeats + 1)]
    return statistics.median(times[1:]) / (2 * count * swap.block_bytes)


def while_serving(cost: FittedCost, serving: Sequence[Serving]) -> FittedCost:
    """The cost of a step while requests are served, together with what passes until the next one begins."""
    matrix = np.array([[1 / each.between, each.num_seqs / each.between] for each in serving])
    per_step, per_row = non_negative(matrix).tolist()
    slowdown = max(1.0, statistics.median(each.slowdown for each in serving))
    slower = cost._replace(**{name: slowdown * getattr(cost, name) for name in LINEAR})
    return slower._replace(step=slower.step + per_step, row=slower.row + per_row)


# -- what serving adds ------------------------------------------------------------------------------------------


class _Watched:
    """An executor that notes when each step began and ended, and how many rows and tokens it had."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[tuple[int, int, float, float]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        result = self._executor.execute(plan)
        self.steps.append((len(plan.rows), plan.num_tokens, start, time.perf_counter()))
        return result

    def served(self, num_seqs: int) -> list[tuple[float, float]]:
        """Seconds of each step in which so many sequences decode and which another such one follows, and until that."""
        wanted = (num_seqs, num_seqs)
        return [
            (before[3] - before[2], after[2] - before[3])
            for before, after in pairwise(self.steps)
            if before[:2] == after[:2] == wanted
        ]


def _serving(engine: Engine, progress: Progress) -> tuple[Serving, ...]:
    """What scheduling, detokenising and handing out add, seen in turn with the same steps alone."""
    room = _room(engine)
    counts = sorted({min(count, room.most_rows) for count in _SERVED})
    found = []
    for index, count in enumerate(counts):
        progress("serving", index, len(counts))
        found.append(_serve_and_compare(engine, count, max(1, min(_SERVED_TOKENS, room.max_model_len - 2))))
    progress("serving", len(counts), len(counts))
    if not (seen := tuple(each for each in found if each is not None)):
        raise ConfigError(
            "max_model_len", f"{room.max_model_len} tokens are too few to see how steps follow each other"
        )
    return seen


def _serve_and_compare(engine: Engine, num_seqs: int, num_tokens: int) -> Serving | None:
    """Serve so many sequences, then compute the same steps alone, _TURNS times; medians of each.

    None if they never were in a step all together twice in a row.
    """
    executor = cast("TorchExecutor", engine.executor)
    plan = executor.rehearsal([(num_tokens // 2, 1)] * num_seqs)
    served, gaps, alone = [], [], []
    for _ in range(_TURNS):
        beside = engine_beside(engine)
        watched = beside.executor = _Watched(executor)
        asyncio.run(_serve(AsyncEngine(beside), num_seqs, num_tokens))
        for seconds, gap in watched.served(num_seqs):
            served.append(seconds)
            gaps.append(gap)
        alone += [executor.execute(plan).elapsed for _ in range(num_tokens)]
    if not gaps:
        return None
    return Serving(num_seqs, statistics.median(gaps), statistics.median(served) / statistics.median(alone))


async def _serve(engine: AsyncEngine, num_seqs: int, num_tokens: int) -> None:
    """Serve requests at a time, each read by a client of its own."""
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
