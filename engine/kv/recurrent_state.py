"""Recurrent state of a sequence: the slots that a step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmsched.engine.kv.prefix_tree import PrefixNode

#: Slots for snapshots: at least LEAST_SNAPSHOTS, and a share of max_num_seqs. Slots of sequences that do not run hold
#: snapshots too.
LEAST_SNAPSHOTS, SNAPSHOT_SHARE = 2, 0.25


def num_state_slots(max_num_seqs: int, *, enable_prefix_caching: bool) -> int:
    """Return how many slots a model with recurrent state needs."""
    return max_num_seqs + (max(LEAST_SNAPSHOTS, int(SNAPSHOT_SHARE * max_num_seqs)) if enable_prefix_caching else 0)


class RowState(NamedTuple):
    """Recurrent state of one row of a step."""

    slot: int  # holds the state after the tokens before the row; the step replaces it by the state after the row
    #: Pairs (number of tokens, slot), in ascending order: the state after this many tokens is copied to the slot.
    saves: Sequence[tuple[int, int]] = ()


class StatePiece(NamedTuple):
    """Consecutive tokens of one sequence in a batch, with the slots of the recurrent state before and after them."""

    first: int  # index of the first token in the batch
    end: int
    source: int
    destination: int
    begins: bool  # True if the tokens are the sequence's first ones


class StateMoves(NamedTuple):
    """Copies of recurrent states before a step: `swap_out` first, then `copies`, then `swap_in`.

    All sources of `copies` are read before anything is written.
    """

    copies: Sequence[tuple[int, int]] = ()  # (source, destination)
    swap_out: Sequence[tuple[int, int]] = ()  # (slot, host slot)
    swap_in: Sequence[tuple[int, int]] = ()  # (host slot, slot)


@dataclass(slots=True, eq=False)
class SequenceState:
    """Recurrent state of a running request."""

    slot: int
    save_at: set[int]  # numbers of tokens after which a snapshot is kept even when the sequence is longer
    saves: list[tuple[int, int]] = field(default_factory=list)  # of rows whose steps are not settled, see RowState
    newest: PrefixNode | None = None  # has a snapshot that the next one replaces
