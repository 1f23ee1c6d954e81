"""Simulation of the load of a published row: the steps that our scheduler makes, and the latencies that follow."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from configs import resolved
from published import PublishedRow

from llmsched.engine.executor.base import RowResult, StepResult
from llmsched.engine.executor.cost import StepCost, StepShape, shape_of
from llmsched.engine.executor.roofline import Roofline
from llmsched.engine.executor.simulated_executor import VirtualClock
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.scheduler.baselines import make_scheduler
from llmsched.profiles.engines import find_engine

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: If a row does not state the number of requests, it is this many times the concurrency.
ROUNDS = 4
#: Longer loads are cut to this many requests, five times as many as run at the same time. The 30,000 requests of
#: TensorRT-LLM 0.17 on an L40S give 9,086 tokens/s uncut and 9,075 tokens/s cut.
MOST_REQUESTS = 8000


class Figures(NamedTuple):
    """Figures of a load: latencies in seconds, and throughput in output tokens per second."""

    tpot: float
    ttft: float
    throughput: float


@dataclass(frozen=True)
class Steps:
    """Steps of a load.

    The arrays in `shapes` have an entry per step, and `idle` has the seconds without work before each step. The other
    arrays have an entry per request. `came` is the time at which the request arrived, in seconds; if the row has no
    rate, it is the index of the first step after that. `first` and `last` are the indices of the steps that computed
    the request's first and last token, and `outputs` is its number of output tokens. The figures leave out the first
    `warm` requests.
    """

    row: PublishedRow
    shapes: StepShape
    idle: Floats
    came: Floats
    first: Ints
    last: Ints
    outputs: Ints
    warm: int

    def figures(self, cost: StepCost) -> Figures:
        """Return the figures of the load if each step takes the time that `cost` gives it."""
        seconds: Floats = np.asarray(cost.seconds(self.shapes)) + self.idle
        ends = np.cumsum(seconds)
        came = self.came
        if self.row.rate == float("inf"):
            came = np.concatenate([[0.0], ends])[came.astype(np.int64)]
        first, last, outputs, came = (each[self.warm :] for each in (self.first, self.last, self.outputs, came))
        duration = ends[-1] - came.min()
        return Figures(
            self._tpot(seconds, ends[first], ends[last], came, outputs),
            float((ends[first] - came).mean()),
            float(outputs.sum() / duration),
        )

    def _tpot(self, seconds: Floats, first: Floats, last: Floats, came: Floats, outputs: Ints) -> float:
        if not (outputs > 1).any():  # an output of one token has no time per token
            return float("nan")
        kind = self.row.tpot.kind if self.row.tpot is not None else "token"
        if kind == "whole":
            return float(((last - came) / outputs).mean())
        if kind == "token":
            return float((last - first).sum() / (outputs - 1).sum())
        if kind == "request":
            several = outputs > 1
            return float(((last - first)[several] / (outputs[several] - 1)).mean())
        order = np.argsort(seconds)
        tokens = np.cumsum(self.shapes.decode_seqs[order])  # type: ignore[index]
        return float(seconds[order][np.searchsorted(tokens, tokens[-1] / 2)])


def published_cost(row: PublishedRow, engine: str | None = None) -> Roofline:
    """Return the cost of steps of the row's model on its GPU with the engine `engine` (None: the row's engine)."""
    return Roofline(row.work(), row.gpu, find_engine(engine or row.engine), dtype=row.dtype)


def load_of(row: PublishedRow) -> list[tuple[float, int, int]]:
    """Return (arrival in seconds, prompt tokens, output tokens) of each request. Without a rate, arrivals are 0."""
    count = row.num_requests or (row.concurrency or 1) * (ROUNDS if (row.concurrency or 1) > 1 else 1)
    count = min(MOST_REQUESTS, row.concurrency or 1 if row.static else count)
    rng = random.Random(0)
    prompts, outputs = _lengths(rng, row, row.input_len, count), _lengths(rng, row, row.output_len, count)
    if row.staggered and row.concurrency:
        shares = [(i + 1) / row.concurrency for i in range(row.concurrency)]
        outputs[: row.concurrency] = [
            max(1, int(share * length)) for share, length in zip(shares, outputs, strict=False)
        ]
    arrivals = [0.0] * count
    if row.rate != float("inf"):
        gaps = [rng.expovariate(1) for _ in range(count)]
        arrivals = list(np.cumsum(gaps) * count / row.rate / sum(gaps))
    return list(zip(arrivals, prompts, outputs, strict=True))


def _lengths(rng: random.Random, row: PublishedRow, mean: float, count: int) -> list[int]:
    """Return `count` lengths in tokens: all equal or, for conversations, log-normal with this mean and a sigma of 1."""
    if not row.long_tailed:
        return [max(1, round(mean))] * count
    drawn = [rng.lognormvariate(0, 1) for _ in range(count)]
    return [min(1024, max(4, round(value * mean * count / sum(drawn)))) for value in drawn]


def steps_of(row: PublishedRow, cost: StepCost) -> Steps:
    """Run the load of a row through the scheduler, and return its steps.

    `cost` matters only if the row has a request rate: step times determine before which step a request arrives.
    """
    return _Run(row, cost).steps()


class _Run:
    def __init__(self, row: PublishedRow, cost: StepCost) -> None:
        self.row, self.cost, self.clock = row, cost, VirtualClock()
        config = row.settings()
        plan = row.plan(config)
        if plan.problem is not None and not row.static:
            raise plan.problem
        blocks = plan.num_blocks
        if row.reserves:  # limit the running requests to the number that fits at full length
            fitting = plan.num_seqs_at(round(row.input_len + row.output_len))
            config = replace(config, max_num_seqs=max(1, min(config.max_num_seqs, fitting)))
        if row.static:  # it was measured, so it did fit
            blocks = max(blocks, 1 << 20)
        kv = KVManager(blocks, plan.layout, enable_prefix_caching=config.enable_prefix_caching)
        self.scheduler = make_scheduler(kv, resolved(**config.chosen()), self.clock)
        self.pending = list(reversed(load_of(row)))
        self.most = row.concurrency if row.concurrency is not None else len(self.pending)
        self.shapes: list[StepShape] = []
        self.idle: list[float] = []
        self.times: list[list[float]] = []  # [came, first, last, outputs] of each request

    def steps(self) -> Steps:
        running = 0
        while self.pending or running:
            idle = 0.0
            if not running and self.pending[-1][0] > self.clock.now:
                idle = self.pending[-1][0] - self.clock.now
                self.clock.now += idle
            while self.pending and running < self.most and self.pending[-1][0] <= self.clock.now:
                self._add()
                running += 1
            running -= self._step(idle)
        came, first, last, outputs = np.array(self.times).T
        return Steps(
            self.row,
            StepShape(*np.array(self.shapes, dtype=np.float64).T),  # type: ignore[arg-type]
            np.array(self.idle),
            came,
            first.astype(np.int64),
            last.astype(np.int64),
            outputs.astype(np.int64),
            (self.row.concurrency or 0) if self.row.staggered else 0,
        )

    def _add(self) -> None:
        arrival, prompt, output = self.pending.pop()
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        name = str(len(self.times))
        self.times.append([arrival if self.row.rate != float("inf") else len(self.shapes), -1, -1, output])
        self.scheduler.add(Request(name, [0] * prompt, prompt, sampling, 0, frozenset(), self.clock.now))

    def _step(self, idle: float) -> int:
        """Run one step after `idle` seconds without work, and return the number of requests that ended."""
        plan = self.scheduler.schedule()
        shape = shape_of(plan, self.cost.window)
        elapsed = self.cost.seconds(shape)
        self.clock.now += elapsed
        result = StepResult([RowResult(token_id=1 if row.sample else None) for row in plan.rows], elapsed)
        ended, index = 0, len(self.shapes)
        self.scheduler.advance(plan)
        for update in self.scheduler.settle(plan, result):
            if update.result.token_id is None:
                continue
            times = self.times[int(update.request.request_id)]
            if times[1] < 0:
                times[1] = index
            times[2] = index
            ended += update.request.finish_reason is FinishReason.LENGTH
        self.shapes.append(shape)
        self.idle.append(idle)
        return ended
