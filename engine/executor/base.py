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

    The row may end with the sequence's pending token (see `Sequence`), whose id is not in `token_ids` yet.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    #: The KV of position p in layer group g is in block block_table[g, p // block_size].
    block_table: npt.NDArray[np.int32]
    sample: bool  # True if the row ends the sequence, and a token is sampled from its last logits


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one packed forward pass of prefill chunks and decodes, with at most one row per sequence.

    Before the pass, the executor copies blocks: first `swap_out`, then `copies`, then `swap_in`. Within each list, no
    block is written twice or read after it was written.
    """

    rows: ListLike[ScheduledRow]
    finished: ListLike[str] = ()  # request ids of sequences that ended since the last plan
    copies: ListLike[tuple[int, int]] = ()  # (source, destination)
    swap_out: ListLike[tuple[int, int]] = ()  # (block, host block)
    swap_in: ListLike[tuple[int, int]] = ()  # (host block, block)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class RowResult:
    """Result of one ScheduledRow. An `error` ends only this sequence."""

    token_id: int | None = None  # None if no token was sampled
    logprob: TokenLogprob | None = None
    #: If requested, for the prompt tokens among start + 1 to start + num_tokens.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None
    caused_by_request: bool = False  # False if the model caused the error


@dataclass(slots=True)
class StepResult:
    """Result of a step, with one RowResult per row of the plan, in the same order."""

    rows: list[RowResult]
    elapsed: float  # seconds (virtual if simulated), including swap_elapsed
    swap_elapsed: float = 0.0  # seconds of the copies to and from host memory


#: What `Executor.launch` returns and `Executor.collect` takes. Each executor has a type of its own.
Pending: TypeAlias = Any


class Executor(ABC):
    """Base of objects that compute steps. They know nothing of priorities, queues, text and sockets.

    An executor computes steps, with their copies, in the order in which they are launched. So the caller may give a
    block to another request while a launched step still uses it, because the steps of that request are computed later.
    """

    #: A step may be launched before the previous one was collected, and may read its pending tokens.
    looks_ahead: bool = False

    @abstractmethod
    def launch(self, plan: StepPlan) -> Pending:
        """Start to compute a step. Wait for its result only if `looks_ahead` is False.

        After an exception for which `is_out_of_memory` returns True, here or in `collect`, the executor must be able to
        compute another plan. Any other exception stops the engine.
        """

    @abstractmethod
    def collect(self, pending: Pending) -> StepResult:
        """Wait for the result of a launched step. An error of a single row is reported in its RowResult.

        Steps are collected in the order of their launches. A step may be left uncollected if its result is not needed.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))


class SynchronousExecutor(Executor):
    """Base of executors that implement `execute` and never look ahead."""

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
