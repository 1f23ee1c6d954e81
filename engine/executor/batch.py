"""Conversion of a step's rows to flat arrays, without padding and without a Python loop over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmsched.engine.executor.base import ScheduledRow

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Batch of T tokens in B rows, one row after the other, for a model with G groups of layers.

    The shapes are input_ids [T], positions [T], slot_mapping [G, T], block_tables [G, B, max_blocks], cu_seqlens_q [B +
    1] and context_lens [B], all contiguous. A block table has zeros after the blocks of the row's context. A context
    includes the new tokens.

    `pending_rows` are the rows that end with a pending token (see `Executor`); input_ids has a 0 in place of this
    token.

    `logit_rows` are the indices of the tokens whose logits are needed. First come the last tokens of the rows in
    `sampling_rows`. Then come, for each row i, its first `prompt_counts[i]` tokens, which predict prompt tokens.
    """

    input_ids: Int64
    positions: Int64
    slot_mapping: Int64
    block_tables: Int32
    cu_seqlens_q: Int32
    context_lens: Int32
    logit_rows: Int64
    sampling_rows: list[int]
    pending_rows: list[int]
    prompt_counts: list[int]


def pack(rows: ListLike[ScheduledRow], block_size: int, size: int | None = None) -> PackedBatch:
    """Pack one or more rows into a PackedBatch.

    With `size`, rows of one token are added until there are `size` rows. They have a context of 1 token and the slot
    -1, so that their KV is not written.
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
    sampling_rows = [index for index, row in enumerate(rows) if row.sample]
    prompt_counts = [num_prompt_predictions(row) for row in rows]
    predictions = [np.arange(bounds[i], bounds[i] + count) for i, count in enumerate(prompt_counts) if count]
    return PackedBatch(
        input_ids=input_ids,
        positions=np.pad(positions, (0, padding)),
        slot_mapping=slots,
        block_tables=block_tables,
        cu_seqlens_q=np.append(bounds, bounds[-1] + np.arange(1, padding + 1)).astype(np.int32),
        context_lens=context_lens,
        logit_rows=np.concatenate([bounds[1:][sampling_rows] - 1, *predictions]),
        sampling_rows=sampling_rows,
        pending_rows=pending_rows,
        prompt_counts=prompt_counts,
    )


def num_prompt_predictions(row: ScheduledRow) -> int:
    """Return how many of the row's first tokens predict a prompt token whose log-probability was requested."""
    if row.sequence.sampling.prompt_logprobs is None:
        return 0
    end = min(row.start + row.num_tokens, row.sequence.num_prompt_tokens - 1)
    return max(0, end - row.start)


def split(rows: ListLike[ScheduledRow], max_predictions: int) -> Iterator[list[tuple[int, ScheduledRow]]]:
    """Split a step into parts, each with at most max_predictions tokens that predict prompt tokens.

    This limits the memory for logits; most steps have one part. Yields each part as a list of (index in `rows`, row or
    piece of that row). The pieces of a row come in order, and only the last piece may sample.
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
