"""Conversion of the rows of a step to flat arrays."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmsched.engine.executor.base import ScheduledRow
from llmsched.engine.kv.recurrent_state import StatePiece
from llmsched.engine.request import NO_ADAPTER

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedStates:
    """Recurrent states of the rows of a PackedBatch."""

    single: Int64  # tokens that are their rows' only ones, padding included
    single_slots: Int64  # slots of their rows' states; -1 for padding
    pieces: list[StatePiece]  # tokens of all other rows, in order
    fresh: list[int]  # slots of sequences that begin
    copies: list[tuple[int, int]]  # (source, destination), after the pass


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Batch of T tokens in B rows, one row after the other, for a model with G layer groups."""

    input_ids: Int64  # [T], with 0 in place of a pending token
    positions: Int64  # [T]
    slot_mapping: Int64  # [G, T]
    block_tables: Int32  # [G, B, max_blocks], with zeros after the blocks of the context
    cu_seqlens_q: Int32  # [B + 1]
    context_lens: Int32  # [B], including the new tokens
    logit_rows: Int64  # tokens whose logits are needed: those of sampling_rows, then first ones (prompt_counts)
    sampling_rows: list[int]  # row of each sampled token: once per sampling row, and once per token of its draft
    pending_rows: list[int]  # rows that end with a pending token
    prompt_counts: list[int]  # per row, how many of its first tokens predict prompt tokens
    adapters: Int32 | None  # [T], adapter of each token, -1 for none; None if no row has an adapter
    states: PackedStates | None = None  # None: the model has no recurrent layers


def pack(rows: ListLike[ScheduledRow], block_size: int, size: int | None = None) -> PackedBatch:
    """Pack one or more rows into a PackedBatch.

    If `size` is given, padding rows are added until there are `size` rows. A padding row has one token, a context of
    one token and the slot -1, so that its KV is not written.
    """
    padding = 0 if size is None else size - len(rows)
    lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    bounds = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    contexts = starts + lengths
    widths = -(-contexts // block_size)
    input_ids = np.zeros(bounds[-1] + padding, dtype=np.int64)
    pending_rows = []
    block_tables = np.zeros((len(rows[0].block_table), len(rows) + padding, int(widths.max())), dtype=np.int32)
    for index, row in enumerate(rows):
        known_ids = row.sequence.token_ids[row.start : row.start + row.num_tokens]
        known_ids.extend(row.draft)
        if len(known_ids) < row.num_tokens:
            pending_rows.append(index)
        input_ids[bounds[index] : bounds[index] + len(known_ids)] = known_ids
        block_tables[:, index, : widths[index]] = row.block_table[:, : widths[index]]
    owner = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(bounds[-1]) + (starts - bounds[:-1])[owner]
    blocks = block_tables[:, owner, positions // block_size].astype(np.int64)
    slots = np.full((len(blocks), len(input_ids)), -1, dtype=np.int64)
    slots[:, : len(positions)] = blocks * block_size + positions % block_size
    context_lens = np.ones(len(rows) + padding, dtype=np.int32)
    context_lens[: len(rows)] = contexts
    sampling_rows = [index for index, row in enumerate(rows) if row.sample for _ in range(1 + len(row.draft))]
    num_later = [later for row in rows if row.sample for later in range(len(row.draft), -1, -1)]
    prompt_counts = [num_prompt_predictions(row) for row in rows]
    predictions = [np.arange(bounds[i], bounds[i] + count) for i, count in enumerate(prompt_counts) if count]
    return PackedBatch(
        input_ids=input_ids,
        positions=np.pad(positions, (0, padding)),
        slot_mapping=slots,
        block_tables=block_tables,
        cu_seqlens_q=np.append(bounds, bounds[-1] + np.arange(1, padding + 1)).astype(np.int32),
        context_lens=context_lens,
        logit_rows=np.concatenate([bounds[1:][sampling_rows] - 1 - np.array(num_later, dtype=np.int64), *predictions]),
        sampling_rows=sampling_rows,
        pending_rows=pending_rows,
        prompt_counts=prompt_counts,
        adapters=_adapters(rows, owner, padding),
        states=None if rows[0].state is None else pack_states(rows, size),
    )


def _adapters(rows: ListLike[ScheduledRow], owner: Int64, padding: int) -> Int32 | None:
    """Return the adapter of each token, or None if no row has one. `owner` is the row of each token."""
    adapters = [row.sequence.adapter for row in rows]
    if max(adapters) == NO_ADAPTER:
        return None
    return np.pad(np.array(adapters, dtype=np.int32)[owner], (0, padding), constant_values=NO_ADAPTER)


def pack_states(rows: ListLike[ScheduledRow], size: int | None = None) -> PackedStates:
    """Pack the recurrent states of rows. `size` is as in `pack(...)`."""
    single: list[int] = []
    slots: list[int] = []
    pieces: list[StatePiece] = []
    fresh: list[int] = []
    copies: list[tuple[int, int]] = []
    first = 0
    for row in rows:
        assert row.state is not None
        slot, saves = row.state
        end = row.start + row.num_tokens
        if row.start == 0:
            fresh.append(slot)
        if row.num_tokens == 1:
            single.append(first)
            slots.append(slot)
        else:
            start, source = row.start, slot
            inner = [(at, place) for at, place in saves if row.start < at < end]
            for at, place in [*inner, (end, slot)]:
                places = (first + start - row.start, first + at - row.start)
                pieces.append(StatePiece(*places, source, place, begins=start == 0))
                start, source = at, place
        copies += [(slot, place) for at, place in saves if at == end]
        first += row.num_tokens
    padding = 0 if size is None else size - len(rows)
    single += range(first, first + padding)
    return PackedStates(np.array(single, np.int64), np.array(slots + [-1] * padding, np.int64), pieces, fresh, copies)


def num_prompt_predictions(row: ScheduledRow) -> int:
    """Return the number of prompt tokens whose requested log-probabilities come from logits of this row."""
    if row.sequence.sampling.prompt_logprobs is None:
        return 0
    end = min(row.start + row.num_tokens, row.sequence.num_prompt_tokens - 1)
    return max(0, end - row.start)


def split(rows: ListLike[ScheduledRow], max_predictions: int) -> Iterator[list[tuple[int, ScheduledRow]]]:
    """Split a step into parts with at most `max_predictions` requested log-probabilities of prompt tokens each.

    A part is a list of (index in `rows`, row or piece of this row). The pieces of a row come in order, and a token is
    sampled from the last piece only.
    """
    part: list[tuple[int, ScheduledRow]] = []
    room = max_predictions
    for index, whole in enumerate(rows):
        rest = whole
        while (wanted := num_prompt_predictions(rest)) > room:
            if room:
                part.append((index, rest._replace(num_tokens=room, sample=False)))
                rest = rest._replace(start=rest.start + room, num_tokens=rest.num_tokens - room)
            yield part
            part, room = [], max_predictions
        part.append((index, rest))
        room -= wanted
    if part:
        yield part
