"""Interface between a scheduler, which plans steps, and an executor, which computes the steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from llmsched.engine.kv.recurrent_state import RowState, StateMoves
from llmsched.engine.request import Sequence, TokenLogprob


class ScheduledRow(NamedTuple):
    """Tokens of one sequence that a step computes: token_ids[start : start + num_tokens]."""

    sequence: Sequence
    start: int
    num_tokens: int  # the last token may be pending: sampled, but not in `token_ids` yet; counts the draft
    #: The KV of position p in layer group g is in block block_table[g, p // block_size].
    block_table: npt.NDArray[np.int32]
    sample: bool  # True if the row ends the sequence, and a token is sampled from its last logits
    #: Guesses of the tokens after `token_ids`. Tokens are also sampled after each of them.
    draft: tuple[int, ...] = ()
    state: RowState | None = None  # None: the model has no recurrent layers


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one forward pass over a batch of prefill chunks and decodes, with at most one row per sequence.

    Before the pass, the executor copies the blocks in `swap_out`, then in `copies`, then in `swap_in`. Within each
    list, no block is written twice, and no block is read after it was written. Then it makes `state_moves`.
    """

    rows: ListLike[ScheduledRow]
    finished: ListLike[str] = ()  # request ids of sequences that ended since the last plan
    copies: ListLike[tuple[int, int]] = ()  # (source, destination)
    swap_out: ListLike[tuple[int, int]] = ()  # (block, host block)
    swap_in: ListLike[tuple[int, int]] = ()  # (host block, block)
    num_draft_tokens: int = 0  # of all rows together
    state_moves: StateMoves = StateMoves()  # of recurrent states

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def changed_states(self) -> Iterator[int]:
        """Yield the slots of all recurrent states that the step replaces."""
        yield from (row.state.slot for row in self.rows if row.state is not None)
        yield from (slot for _, slot in (*self.state_moves.copies, *self.state_moves.swap_in))


@dataclass(slots=True)
class RowResult:
    token_id: int | None = None  # None if no token was sampled
    logprob: TokenLogprob | None = None
    #: If requested, for the prompt tokens among start + 1 to start + num_tokens.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None  # ends only this sequence
    caused_by_request: bool = False  # False if the model caused the error
    #: Results after each token of the draft. A result is valid only if all draft tokens before it were sampled.
    more: ListLike[RowResult] = ()

    @property
    def last(self) -> RowResult:
        return self.more[-1] if self.more else self


@dataclass(slots=True)
class StepResult:
    """Result of a step, with one RowResult per row of the plan, in the same order."""

    rows: list[RowResult]
    elapsed: float  # seconds (virtual if simulated), including swap_elapsed
    swap_elapsed: float = 0.0  # seconds of the copies to and from host memory


#: What `Executor.launch` returns and `Executor.collect` takes. Each executor has a type of its own.
Pending: TypeAlias = Any


class Executor(ABC):
    """Base class of objects that compute steps, in the order in which the steps are launched."""

    # Because steps are computed in order, the caller may give a block to another request while a launched step still
    # uses the block.

    #: A step may be launched before the previous one was collected, and may read its pending tokens.
    looks_ahead: bool = False
    #: Seconds that the host has spent on masks of grammars so far.
    mask_seconds: float = 0.0

    @abstractmethod
    def launch(self, plan: StepPlan) -> Pending:
        """Start to compute a step. Wait for the result only if `looks_ahead` is False.

        After an out-of-memory error here or in `collect(...)`, the executor must be able to compute another plan. Any
        other error stops the engine.
        """

    @abstractmethod
    def collect(self, pending: Pending) -> StepResult:
        """Wait for the result of a launched step. An error of a single row is reported in its RowResult.

        Steps are collected in the order of their launches. A step whose result is not needed may be left uncollected.
        """

    def execute(self, plan: StepPlan) -> StepResult:
        return self.collect(self.launch(plan))


class SynchronousExecutor(Executor):
    """Base class of executors that compute a step during its launch."""

    def launch(self, plan: StepPlan) -> StepResult:
        return self.execute(plan)

    def collect(self, pending: StepResult) -> StepResult:
        return pending

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult: ...


class ObservedExecutor(Executor):
    """Wrapper of an executor that calls `observe(plan, result)` for each collected step."""

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
