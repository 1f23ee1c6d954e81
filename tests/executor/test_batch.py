"""Packing and splitting, against the definition written with loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from llmsched.engine.executor.base import ScheduledRow
from llmsched.engine.executor.batch import num_prompt_predictions, pack, split
from llmsched.engine.request import Sequence
from llmsched.engine.sampling_params import SamplingParams

GROUPS = 2


def make_row(
    length: int, start: int, num_tokens: int, *, sample: bool = False, logprobs: int | None = None, prompt: int = 10**6
) -> ScheduledRow:
    tokens = [100 * length + position for position in range(length)]
    sampling = SamplingParams(prompt_logprobs=logprobs)
    sequence = Sequence(f"{length}", tokens, min(prompt, length), sampling, 0, frozenset())
    groups = [[(7 * index + group + length) % 64 for index in range(-(-length // 4))] for group in range(GROUPS)]
    blocks = np.array(groups, dtype=np.int32)
    return ScheduledRow(sequence, start, num_tokens, blocks, sample)


def test_pack_equals_the_definition() -> None:
    rows = [
        make_row(9, 3, 6, sample=True),
        make_row(17, 0, 17, logprobs=0),
        make_row(30, 29, 1, sample=True),
        make_row(5, 4, 1, sample=True, logprobs=2, prompt=3),
        make_row(12, 4, 4, logprobs=5, prompt=7),
    ]
    batch = pack(rows, block_size=4)
    ids, positions, bounds = [], [], [0]
    slots: list[list[int]] = [[] for _ in range(GROUPS)]
    for row in rows:
        for position in range(row.start, row.start + row.num_tokens):
            ids.append(row.sequence.token_ids[position])
            positions.append(position)
            for group, table in zip(slots, row.block_table, strict=True):
                group.append(int(table[position // 4]) * 4 + position % 4)
        bounds.append(len(ids))
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.slot_mapping.flags.c_contiguous
    assert batch.cu_seqlens_q.tolist() == bounds
    assert batch.context_lens.tolist() == [9, 17, 30, 5, 8]
    assert batch.block_tables.shape == (GROUPS, 5, 8)
    for index, (row, context) in enumerate(zip(rows, batch.context_lens, strict=True)):
        table, width = batch.block_tables[:, index], -(-int(context) // 4)
        assert table[:, :width].tolist() == row.block_table[:, :width].tolist()
        assert not table[:, width:].any()
    assert batch.sampling_rows == [0, 2, 3]
    assert batch.prompt_counts == [0, 16, 0, 0, 2]
    assert batch.logit_rows.tolist() == [5, 23, 24, *range(6, 22), 25, 26]
    assert batch.block_tables.dtype == batch.cu_seqlens_q.dtype == batch.context_lens.dtype == np.int32
    assert batch.slot_mapping.dtype == batch.logit_rows.dtype == batch.input_ids.dtype == np.int64


def test_no_row_samples() -> None:
    batch = pack([make_row(9, 0, 5)], block_size=16)
    assert batch.logit_rows.tolist() == []
    assert batch.logit_rows.dtype == np.int64


@pytest.mark.parametrize(
    ("start", "num_tokens", "prompt", "expected"),
    [(0, 8, 8, 7), (0, 4, 8, 4), (4, 4, 8, 3), (7, 1, 8, 0), (8, 1, 8, 0), (0, 9, 8, 7), (0, 1, 1, 0)],
)
def test_predictions_stop_at_the_last_prompt_token(start: int, num_tokens: int, prompt: int, expected: int) -> None:
    assert num_prompt_predictions(make_row(12, start, num_tokens, logprobs=0, prompt=prompt)) == expected
    assert num_prompt_predictions(make_row(12, start, num_tokens, prompt=prompt)) == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 16, 100])
def test_split_bounds_predictions_and_loses_nothing(limit: int) -> None:
    rows = [
        make_row(9, 0, 9, sample=True, logprobs=1),
        make_row(6, 5, 1, sample=True),
        make_row(17, 2, 15, sample=True, logprobs=1, prompt=12),
        make_row(8, 0, 4, logprobs=1),
    ]
    parts = list(split(rows, limit))
    assert all(sum(num_prompt_predictions(row) for _, row in part) <= limit for part in parts)
    if limit == 100:
        assert parts == [list(enumerate(rows))]
    for index, whole in enumerate(rows):
        pieces = [row for part in parts for i, row in part if i == index]
        assert pieces[0].start == whole.start
        assert sum(piece.num_tokens for piece in pieces) == whole.num_tokens
        assert all(a.start + a.num_tokens == b.start for a, b in pairwise(pieces))
        assert [piece.sample for piece in pieces] == [False] * (len(pieces) - 1) + [whole.sample]
        assert all(piece.num_tokens > 0 for piece in pieces)
        assert all(len({i for i, _ in part}) == len(part) for part in parts)
