"""Interface between the scheduler, which makes StepPlans, and an executor, which turns each into a StepResult."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from llmsched.engine.request import Sequence, TokenLogprob


class ScheduledRow(NamedTuple):
    """Part of a sequence that a step computes: the tokens `sequence.token_ids[start : start + num_tokens]`.

    `block_table` (int32 block ids [groups, width]) says where KV is stored: the KV of position p in layer group g is in
    block block_table[g, p // block_size]. The table already has blocks for the new tokens. Ids of blocks before a
    sliding window have no meaning.

    If `sample` is True, the row ends at the end of the sequence, and a new token is sampled from the logits of its last
    position. A row may end with the sequence's pending token (see `Sequence`), whose id is not in `token_ids` yet.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    block_table: npt.NDArray[np.int32]
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one packed forward pass of prefill chunks and decodes, with at most one row per sequence.

    `finished` has the request ids of the sequences that ended since the last plan; the executor drops their state.
    Before the pass, the executor copies KV blocks: first `swap_out` (block, host block), then `copies` (source,
    destination), then `swap_in` (host block, block). Within each list, no block is written twice or read after it was
    written.
    """

    rows: ListLike[ScheduledRow]
    finished: ListLike[str] = ()
    copies: ListLike[tuple[int, int]] = ()
    swap_out: ListLike[tuple[int, int]] = ()
    swap_in: ListLike[tuple[int, int]] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class RowResult:
    """Result of one ScheduledRow. `token_id` is None if no token was sampled. An `error` ends only this sequence.

    `prompt_logprobs` is empty if the request did not ask for them. Otherwise it has one entry for each prompt token
    among the tokens start + 1 to start + num_tokens of the sequence. `caused_by_request` is True if the error is due to
    the request's own parameters, and False if the error is due to the model.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    caused_by_request: bool = False


@dataclass(slots=True)
class StepResult:
    """Result of a step, with one RowResult per row of the plan, in the same order.

    `elapsed` is the time of the step in seconds (virtual time if simulated). It includes `swap_elapsed`, the seconds of
    the copies to and from host memory.
    """

    rows: list[RowResult]
    elapsed: float
    swap_elapsed: float = 0.0


#: What `Executor.launch` returns and `Executor.collect` takes. Each executor has a type of its own.
Pending: TypeAlias = Any


class Executor(ABC):
    """Base of objects that compute steps. They know nothing of priorities, queues, text and sockets.

    An executor computes steps, with their copies, in the order in which they are launched: each step sees all KV and
    all host blocks as the steps before it leave them. So the caller may give a block to another request while a
    launched step still uses it, because the steps of that request are computed later.

    If `looks_ahead` is True, a step may be launched before the result of the step before it was collected. Its rows may
    then end with pending tokens (`Sequence.num_pending_tokens`): tokens that the step before it samples.
    """

    looks_ahead: bool = False

    @abstractmethod
    def launch(self, plan: StepPlan) -> Pending:
        """Start to compute a step, and do not wait for its result if `looks_ahead` is True.

        After an exception for which `is_out_of_memory` returns True, here or in `collect`, the executor must be able to
        compute another plan. Any other exception stops the engine.
        """

    @abstractmethod
    def collect(self, pending: Pending) -> StepResult:
        """Wait for the result of a launched step. An error of a single row is reported in its RowResult.

        Steps are collected in the order of their launches. A step may be left uncollected if its result is not needed.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step: `launch` and `collect`."""
        return self.collect(self.launch(plan))


class SynchronousExecutor(Executor):
    """Base of executors that compute a step at once. They implement `execute`, and never look ahead."""

    def launch(self, plan: StepPlan) -> StepResult:
        return self.execute(plan)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult: ...


class ObservedExecutor(Executor):
    """Executor that passes plans on to `executor`, and calls `observe` with each plan and its result."""

    def __init__(self, executor: Executor, observe: Callable[[StepPlan, StepResult], None]) -> None:
        self.looks_ahead = executor.looks_ahead
        self._executor = executor
        self._observe = observe

    def launch(self, plan: StepPlan) -> Pending:
        return plan, self._executor.launch(plan)

    def collect(self, pending: Pending) -> StepResult:
        plan, launched = pending
        result = self._executor.collect(launched)
        self._observe(plan, result)
        return result
