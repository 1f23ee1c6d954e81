"""The executor without a model: the same scheduler and KV manager, a virtual clock, time from a cost model."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.executor.cost import StepShape, shape_of
from llmsched.engine.request import Sequence


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class StepCost(Protocol):
    """How long a step takes. `window` is that of the model's windowed layers in tokens, None if it has none."""

    @property
    def window(self) -> int | None: ...

    def seconds(self, shape: StepShape) -> float: ...


class LinearCost(NamedTuple):
    """Seconds: fixed, per prefill token, per decoding sequence, per token of KV read."""

    fixed: float
    per_prefill_token: float
    per_decode_seq: float
    per_kv_token: float

    @property
    def window(self) -> None:
        """Windows make no difference here."""

    def seconds(self, shape: StepShape) -> float:
        return (
            self.fixed
            + self.per_prefill_token * shape.prefill_tokens
            + self.per_decode_seq * shape.decode_seqs
            + self.per_kv_token * shape.kv_tokens
        )


class SimulatedExecutor:
    """Advances `clock` by what `cost` says of each step, and makes up tokens.

    `output_length` says after how many output tokens a sequence ends by itself (with its first stop id); None: never.
    `per_swapped_block` are the seconds that a block takes to or from host memory.
    """

    def __init__(
        self,
        cost: StepCost,
        clock: VirtualClock,
        output_length: Callable[[Sequence], int | None] = lambda _: None,
        per_swapped_block: float = 0.0,
    ) -> None:
        self._cost = cost
        self._per_swapped_block = per_swapped_block
        self._clock = clock
        self._output_length = output_length

    def execute(self, plan: StepPlan) -> StepResult:
        swapping = self._per_swapped_block * (len(plan.swap_out) + len(plan.swap_in))
        elapsed = self._cost.seconds(shape_of(plan, self._cost.window)) + swapping
        self._clock.now += elapsed
        return StepResult([self._result(row) for row in plan.rows], elapsed, swapping)

    def _result(self, row: ScheduledRow) -> RowResult:
        if not row.sample:
            return RowResult()
        sequence = row.sequence
        length = self._output_length(sequence)
        if length is not None and sequence.num_output_tokens + 1 >= length and sequence.stop_ids:
            return RowResult(token_id=min(sequence.stop_ids))
        # Never a stop id, and different between requests so that outputs do not look like shared prefixes.
        return RowResult(token_id=1_000_000 + zlib.crc32(sequence.request_id.encode()) % 1_000_000)
