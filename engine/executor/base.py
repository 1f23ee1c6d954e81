"""Contract between scheduler and executor: a StepPlan goes in, a StepResult comes out."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmsched.engine.request import Sequence, TokenLogprob


class ScheduledRow(NamedTuple):
    """Part of one sequence that a step computes: tokens `start .. start + num_tokens` of `sequence.token_ids`.

    Their KV goes to the same positions of `block_table` (int32 block ids [groups, width]), which already covers them:
    for group g of layers, position p is in block_table[g, p // block_size]. The KV of earlier positions that the group
    sees has been computed; ids before a group's window are meaningless. If `sample` is set, the tokens reach the end of
    the sequence, and the logits of the last position yield a new token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    block_table: npt.NDArray[np.int32]
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed forward pass of prefill chunks and decodes. A sequence has at most one row.

    `finished` names the sequences that ended since the last plan, so that the executor can drop their state.

    The executor first copies KV: `swap_out`, (block, host block) pairs, then `copies`, (source, destination) blocks,
    then `swap_in`, (host block, block) pairs. Within each list the order does not matter: each block is written once,
    and none is read after it was written.
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
    """Result of a row. `token_id` is None for a row that did not sample.

    `prompt_logprobs` has entries, if the sequence asked for them, for the prompt tokens that the computed positions
    predict: tokens start + 1 .. start + num_tokens, as far as they belong to the prompt. `error` ends this sequence
    alone.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class StepResult:
    """One RowResult per row of the plan, in its order, and the step's time.

    `elapsed` is in seconds (virtual ones for a simulated executor) and includes `swap_elapsed`, the copies from and to
    host memory.
    """

    rows: list[RowResult]
    elapsed: float
    swap_elapsed: float = 0.0


class Executor(Protocol):
    """Object that computes steps. It knows tokens, blocks and sampling, but no priorities, queues, text or sockets."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. An exception stops the engine; a fault of one row becomes its `error`."""
        ...
