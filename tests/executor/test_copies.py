"""Copied blocks equal computed ones, and copies run before anything is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stepping import make_sequence
from tiny_models import ARCHITECTURES, VOCAB_SIZE, build_model

from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.request import Sequence

BLOCK_SIZE = 8
LENGTH = 21  # two whole blocks and five tokens


def prompt(seed: int, common: int = 0) -> list[int]:
    """Return random tokens, of which the first `common` are the same for every seed."""
    ids = torch.randint(4, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    same = torch.randint(4, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(99))
    return [*same[:common].tolist(), *ids[0][common:].tolist()]


def row(sequence: Sequence, start: int, blocks: list[int]) -> ScheduledRow:
    return ScheduledRow(sequence, start, sequence.num_tokens - start, np.array([blocks], dtype=np.int32), sample=True)


def best(result: RowResult) -> list[float]:
    assert result.logprob is not None
    return [result.token_id or 0, *(value for _, value in result.logprob.top)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_behind_a_copied_part_are_the_same(arch: str) -> None:
    executor = TorchExecutor(
        build_model(arch, seed=3), num_blocks=16, block_size=BLOCK_SIZE, device="cpu", kv_dtype=torch.float32
    )
    sequences = [make_sequence(str(i), prompt(i, common=13), logprobs=5) for i in range(4)]
    expected = [executor.execute(StepPlan([row(s, 0, [10, 11, 12])])).rows[0] for s in sequences]
    executor.execute(StepPlan([row(sequences[0], 0, [0, 1, 2])]))
    # 1 and 2 begin with 13 tokens of sequence 0: block 0 and five tokens of block 1. In the same step block 1 goes to
    # sequence 3 as the destination of a copy from 5 (nothing of use), and is written.
    rows = [row(sequences[3], 0, [1, 5, 6]), row(sequences[1], 13, [0, 3, 7]), row(sequences[2], 13, [0, 4, 8])]
    found = executor.execute(StepPlan(rows, copies=[(1, 3), (1, 4), (5, 1)])).rows
    for result, wanted in zip(found, (expected[3], expected[1], expected[2]), strict=True):
        assert best(result) == pytest.approx(best(wanted), abs=1e-4)
