"""Interface between scheduler and executor: an executor computes a StepPlan and returns a StepResult."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmsched.engine.request import Sequence, TokenLogprob


class ScheduledRow(NamedTuple):
    """Part of a sequence that a step computes: `sequence.token_ids[start : start + num_tokens]`.

    Their KV goes to the same positions of `block_table` (int32 block ids [groups, width]), which already covers them:
    position p of layer group g is in block_table[g, p // block_size]. The KV of all earlier positions that the group
    sees has been computed; block ids before a sliding window are meaningless. If `sample` is set, the row reaches the
    end of the sequence, and the logits of its last position yield a new token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    block_table: npt.NDArray[np.int32]
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed forward pass of prefill chunks and decodes, with at most one row per sequence.

    `finished` names the sequences that ended since the last plan, so that the executor can drop their state.

    Before the pass, the executor copies KV blocks: `swap_out` (block, host block), then `copies` (source, destination),
    then `swap_in` (host block, block). The order within each list does not matter: each block is written once, and no
    block is read after it was written.
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

    `prompt_logprobs`, if the sequence asked for them, has an entry for each prompt token that the computed positions
    predict: tokens start + 1 .. start + num_tokens, up to the end of the prompt. `error` ends only this sequence.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class StepResult:
    """Results of a step: one RowResult per row of the plan, in the same order, and times in seconds.

    `elapsed` is the step's time (virtual time for a simulated executor). It includes `swap_elapsed`, the time of the
    copies from and to host memory.
    """

    rows: list[RowResult]
    elapsed: float
    swap_elapsed: float = 0.0


class Executor(Protocol):
    """Object that computes steps. It knows tokens, blocks and sampling, but no priorities, queues, text or sockets."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. An exception stops the engine; a failure of one row is that row's `error`."""
        ...
