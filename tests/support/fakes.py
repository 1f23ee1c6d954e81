"""An executor without a model: its KV cache holds token ids, so a wrong block or position is seen at once."""

from __future__ import annotations

import zlib

import numpy as np

from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.request import Request, SamplingParams

VOCAB = 1000


def next_token(token_ids: list[int]) -> int:
    """The token that the fake model puts after `token_ids`: depends on all of them and their order."""
    return zlib.crc32(np.asarray(token_ids, dtype=np.int64).tobytes()) % VOCAB


def reference(prompt: list[int], count: int) -> list[int]:
    """What a request alone generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeExecutor:
    """Writes the ids it is given into its slots, reads the sequence back through its block table, and checks it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.block_size = block_size
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        assert len({row.sequence.request_id for row in plan.rows}) == len(plan.rows), "a sequence has two rows"
        for row in plan.rows:
            self._write(row)
        return StepResult([self._read(row) for row in plan.rows], elapsed=1.0)

    def _write(self, row: ScheduledRow) -> None:
        assert row.num_tokens > 0
        for position in range(row.start, row.start + row.num_tokens):
            block = row.block_table[position // self.block_size]
            self.kv[block, position % self.block_size] = row.sequence.token_ids[position]

    def _read(self, row: ScheduledRow) -> RowResult:
        end = row.start + row.num_tokens
        seen = self.kv[row.block_table].reshape(-1)[:end].tolist()
        assert seen == row.sequence.token_ids[:end], f"{row.sequence.request_id}: the KV is not its own"
        return RowResult(token_id=next_token(seen) if row.sample else None)


def make_request(name: str, prompt: list[int], max_tokens: int = 8, arrival: float = 0.0, **more: object) -> Request:
    """A greedy request that ends by length alone."""
    return Request(
        request_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        seed=0,
        stop_ids=frozenset(),
        arrival_time=arrival,
        **more,  # type: ignore[arg-type]
    )
