"""The contract between scheduler and executor: a StepPlan goes in, a StepResult comes out."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llmsched.engine.request import Sequence, TokenLogprob


class ScheduledRow(NamedTuple):
    """One sequence's part of a step.

    Tokens `start .. start + num_tokens` of `sequence.token_ids` are computed; their KV goes to the same positions of
    `block_table` (int32 block ids [groups, width], of group g position p lives in block_table[g, p // block_size]),
    which already covers them. The KV of all positions before `start` that a layer of the group sees is there; in front
    of a group's window ids mean nothing. Only if `sample` is set do the tokens reach the end of the sequence and
    the last position's logits yield a new token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    block_table: npt.NDArray[np.int32]
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed forward pass: prefill chunks and decodes alike. A sequence has at most one row.

    `finished` names the sequences that ended since the last plan, so that the executor can drop what it keeps of them.

    Before anything is computed, KV is copied: first `swap_out`, (block, slot of host memory) pairs, then `copies`,
    (source, destination) blocks, then `swap_in`, (slot, block) pairs. Each of these in its order, or all read before
    any is written, which is the same: nothing is read after it was written, and each place is written once.
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
    """What a row yielded. `token_id` is None for a row that did not sample.

    `prompt_logprobs`, if the sequence asked for them: entries for the prompt tokens that the computed positions
    predict, i.e. tokens start+1 .. start+num_tokens that belong to the prompt. `error` ends this sequence alone.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class StepResult:
    """One RowResult per row of the plan, in its order. `elapsed` is in seconds (virtual for a simulated executor), of
    which copies from and to host memory took `swap_elapsed`.
    """

    rows: list[RowResult]
    elapsed: float
    swap_elapsed: float = 0.0


class Executor(Protocol):
    """Computes steps. Knows tokens, blocks and sampling; never priorities, queues, text or sockets."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. An exception means that the engine cannot go on; a fault of one row is its `error`."""
        ...
