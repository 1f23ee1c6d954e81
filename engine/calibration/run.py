"""Measuring a device: the time of steps, of what the engine does between them, and of copies to host memory."""

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
from llmsched.engine.calibration.shapes import Room, Rows, choose_steps
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor.base import Executor, StepPlan, StepResult
from llmsched.engine.executor.cost import shape_of
from llmsched.engine.executor.fitted import FittedCost
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.progress import Progress, silent
from llmsched.engine.request import SamplingParams
from llmsched.engine.service import AsyncEngine

if TYPE_CHECKING:
    from llmsched.engine.executor.torch_executor import TorchExecutor

#: Steps that are needed for the coefficients to mean anything.
MIN_STEPS = 12
#: Sequences that are served at a time to see what passes between steps, and for how many tokens.
_SERVED = (1, 8, 32)
_SERVED_TOKENS = 16
#: Host memory for the copies that are measured, where none is asked for, and blocks that are copied at a time.
_SWAPPING: Mapping[str, Any] = {"swap_space": 256 << 20, "preemption_mode": "auto"}
_MOST_SWAPPED = 64


class Between(NamedTuple):
    """Median seconds between the end of a step and the start of the next while `num_seqs` sequences decode."""

    num_seqs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was measured: its name and rows, and the median of its times in seconds."""

    name: str
    rows: Rows
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of `engine`, and what follows from it.

    `fit` is to the `samples` of the steps alone, in their order; `cost` adds what passes between them.
    `swap_seconds_per_byte` is for copying KV in one direction.
    """

    engine: Engine
    steps: tuple[Step, ...]
    samples: tuple[Sample, ...]
    between: tuple[Between, ...]
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
    between = _between(engine, progress)
    measured = [Step(name, rows, time) for (name, rows), time in zip(steps.items(), seconds, strict=True)]
    return Measured(engine, tuple(measured), samples, between, found, with_between(found.cost, between), swap)


def _room(engine: Engine) -> Room:
    tokens, plan = engine.config.max_num_batched_tokens, engine.plan
    assert tokens is not None
    assert plan is not None
    return Room(tokens, engine.config.max_num_seqs, engine.max_model_len, plan.num_tokens)


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
    count = min(_MOST_SWAPPED, swap.num_slots, executor.num_blocks)
    plan = executor.rehearsal([(0, 1)], num_swapped=count)
    times = [executor.execute(plan).swap_elapsed for _ in range(repeats + 1)]
    return statistics.median(times[1:]) / (2 * count * swap.block_bytes)


def with_between(cost: FittedCost, between: Sequence[Between]) -> FittedCost:
    """The cost of a step together with what passes until the next one begins."""
    per_step, per_row = non_negative(np.array([[1 / seconds, num_seqs / seconds] for num_seqs, seconds in between]))
    return cost._replace(step=cost.step + float(per_step), row=cost.row + float(per_row))


# -- what passes between steps ---------------------------------------------------------------------------------


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

    def gaps(self, num_seqs: int) -> list[float]:
        """Seconds from the end of a step in which so many sequences decode to the start of another such one."""
        wanted = (num_seqs, num_seqs)
        pairs = pairwise(self.steps)
        return [after[2] - before[3] for before, after in pairs if before[:2] == after[:2] == wanted]


def _between(engine: Engine, progress: Progress) -> tuple[Between, ...]:
    """What scheduling, detokenising and handing out take, seen while requests are served."""
    room = _room(engine)
    counts = sorted({min(count, room.max_num_seqs, room.max_num_batched_tokens) for count in _SERVED})
    found = []
    for index, count in enumerate(counts):
        progress("serving", index, len(counts))
        served = engine_beside(engine)
        watched = served.executor = _Watched(engine.executor)
        asyncio.run(_serve(AsyncEngine(served), count, min(_SERVED_TOKENS, room.max_model_len - 1)))
        found.append(Between(count, statistics.median(watched.gaps(count))))
    progress("serving", len(counts), len(counts))
    return tuple(found)


async def _serve(engine: AsyncEngine, num_seqs: int, num_tokens: int) -> None:
    """Serve requests at a time, each read by a client of its own."""
    engine.start()

    async def read(number: int) -> None:
        prompt = [(number * 31 + position) % engine.model.vocab_size for position in range(2)]
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async with engine.submit(str(number), prompt, sampling) as stream:
            async for _ in stream:
                pass

    try:
        await asyncio.gather(*(read(number) for number in range(num_seqs)))
    finally:
        await engine.stop()
