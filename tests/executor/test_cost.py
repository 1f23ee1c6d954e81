"""The shape of a step, against a walk over every query and key."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import make_request

from llmsched.engine.executor.base import ScheduledRow, StepPlan
from llmsched.engine.executor.cost import StepShape, shape_of

#: (start, tokens, sampled) of each row.
ROWS = [(0, 40, True), (100, 1, True), (7, 1, True), (30, 25, False), (3, 5, False), (0, 1, False), (64, 64, True)]


def plan_of(rows: list[tuple[int, int, bool]]) -> StepPlan:
    table = np.zeros(0, dtype=np.int32)
    request = make_request("r", [1])
    return StepPlan([ScheduledRow(request, start, count, table, sample) for start, count, sample in rows])


def walked(rows: list[tuple[int, int, bool]], window: int | None) -> tuple[int, int, int]:
    """Count KV tokens of all rows, and KV tokens and pairs of prefill rows, one by one."""
    kv = prefill_kv = pairs = 0
    for start, count, _ in rows:
        seen = [
            {key for key in range(query + 1) if window is None or key > query - window}
            for query in range(start, start + count)
        ]
        read = len(set().union(*seen))
        kv += read
        if count > 1:
            prefill_kv += read
            pairs += sum(map(len, seen))
    return kv, prefill_kv, pairs


@pytest.mark.parametrize("window", [None, 1, 8, 32, 64, 1000])
def test_shape_counts_what_attention_reads(window: int | None) -> None:
    shape = shape_of(plan_of(ROWS), window)
    assert (shape.kv_tokens, shape.prefill_kv_tokens, shape.prefill_pairs) == walked(ROWS, None)
    windowed = (shape.window_kv_tokens, shape.window_prefill_kv_tokens, shape.window_pairs)
    assert windowed == walked(ROWS, window)
    assert (shape.prefill_tokens, shape.decode_seqs, shape.sampled_rows) == (134, 3, 4)


def test_a_step_of_decodes_alone() -> None:
    shape = shape_of(plan_of([(9, 1, True), (20, 1, True)]), window=16)
    assert shape == StepShape(0, 2, 31, window_kv_tokens=26, sampled_rows=2)
