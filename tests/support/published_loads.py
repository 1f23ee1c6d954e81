"""Load of a published row, step by step: the steps that the scheduler makes of it, and the resulting figures."""

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
from llmsched.engine.request import FinishReason, Request, SamplingParams
from llmsched.engine.scheduler.policies import make_scheduler
from llmsched.profiles.engines import find_engine

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Requests per concurrent one, where the row does not state the number.
ROUNDS = 4
#: Longer loads are cut to so many requests, five times the concurrency: TensorRT-LLM 0.17's 30,000 on an L40S give
#: 9,086 tokens/s when whole and 9,075 when cut.
MOST_REQUESTS = 8000


class Figures(NamedTuple):
    """Latencies in seconds, and output tokens per second."""

    tpot: float
    ttft: float
    throughput: float


@dataclass(frozen=True)
class Steps:
    """All steps of a load. `shapes` holds arrays [steps]; `idle` [steps] are the seconds without work before each step.

    For each request: its arrival in seconds, or (closed loop and all at once) the step before which it arrived, the
    steps of its first and its last token, and its output tokens. The first `warm` requests do not count.
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
        """Compute the figures if each step takes the time that `cost` gives."""
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
        if not (outputs > 1).any():  # one token has no time per token
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
    """Return the step cost of the row's model on its GPU with its engine class, or with the class of that name."""
    return Roofline(row.work(), row.gpu, find_engine(engine or row.engine), dtype=row.dtype)


def load_of(row: PublishedRow) -> list[tuple[float, int, int]]:
    """Return (arrival, prompt tokens, output tokens) of each request; arrivals are 0 without a rate."""
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
    """Return equal lengths, or log-normal ones with this mean and a sigma of 1 for conversations."""
    if not row.long_tailed:
        return [max(1, round(mean))] * count
    drawn = [rng.lognormvariate(0, 1) for _ in range(count)]
    return [min(1024, max(4, round(value * mean * count / sum(drawn)))) for value in drawn]


def steps_of(row: PublishedRow, cost: StepCost) -> Steps:
    """Run the load through the scheduler; with a request rate, `cost` decides which step a request arrives in."""
    return _Run(row, cost).steps()


class _Run:
    def __init__(self, row: PublishedRow, cost: StepCost) -> None:
        self.row, self.cost, self.clock = row, cost, VirtualClock()
        config = row.settings()
        plan = row.plan(config)
        if plan.problem is not None and not row.static:
            raise plan.problem
        blocks = plan.num_blocks
        if row.reserves:  # GUARANTEED_NO_EVICT: all that a request may need is reserved
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
        self.times: list[list[float]] = []  # came, first, last, outputs

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
        """Run one step; return the number of requests that ended."""
        plan = self.scheduler.schedule()
        shape = shape_of(plan, self.cost.window)
        elapsed = self.cost.seconds(shape)
        self.clock.now += elapsed
        result = StepResult([RowResult(token_id=1 if row.sample else None) for row in plan.rows], elapsed)
        ended, index = 0, len(self.shapes)
        for update in self.scheduler.update(plan, result):
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
