"""Executor that simulates steps: a StepCost predicts their times, and a virtual clock advances."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan, StepResult, SynchronousExecutor
from llmsched.engine.executor.cost import StepCost, shape_of
from llmsched.engine.request import Sequence


class VirtualClock:
    """Clock whose time `now`, in seconds, is set by other objects."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class SimulatedExecutor(SynchronousExecutor):
    """Executor that invents tokens, and advances `clock` by the time that `cost` predicts for each step."""

    cost: StepCost
    clock: VirtualClock
    #: Number of output tokens after which a sequence ends with a stop id; None if it does not.
    output_length: Callable[[Sequence], int | None] = lambda _: None
    per_swapped_block: float = 0.0  # seconds to copy one block to or from host memory

    def execute(self, plan: StepPlan) -> StepResult:
        swapping = self.per_swapped_block * (len(plan.swap_out) + len(plan.swap_in))
        elapsed = self.cost.seconds(shape_of(plan, self.cost.window)) + swapping
        self.clock.now += elapsed
        return StepResult([self._result(row) for row in plan.rows], elapsed, swapping)

    def _result(self, row: ScheduledRow) -> RowResult:
        if not row.sample:
            return RowResult()
        sequence = row.sequence
        length = self.output_length(sequence)
        if length is not None and sequence.num_output_tokens + 1 >= length and sequence.stop_ids:
            return RowResult(token_id=min(sequence.stop_ids))
        return RowResult(token_id=invented_token(sequence.request_id))


def invented_token(request_id: str) -> int:
    """Return the id of all output tokens of a request. It is no stop id, and differs between requests."""
    return 1_000_000 + zlib.crc32(request_id.encode()) % 1_000_000
