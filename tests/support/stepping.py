"""Driver of an executor. It takes the place of a scheduler, so that a test chooses the plans."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
import torch

from llmsched.engine.executor.base import RowResult, ScheduledRow, StepPlan
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.recurrent_state import RowState
from llmsched.engine.request import Sequence, TokenLogprob
from llmsched.engine.sampling_params import SamplingParams


def make_sequence(
    name: str, prompt: ListLike[int], *, seed: int = 0, stop: ListLike[int] = (), **sampling: Any
) -> Sequence:
    params = SamplingParams(**{"max_tokens": 1000, "temperature": 0, **sampling})
    return Sequence(name, list(prompt), len(prompt), params, seed, frozenset(stop))


class Stepper:
    """Driver that computes sequences on an executor in steps with given chunk sizes in tokens.

    Each sequence has blocks for `max_len` tokens, drawn in random order from the executor's blocks.
    """

    def __init__(self, executor: TorchExecutor, sequences: ListLike[Sequence], max_len: int, *, seed: int = 0) -> None:
        self.executor = executor
        self.sequences = list(sequences)
        self.computed = [0] * len(self.sequences)
        self.prompt_logprobs: list[list[TokenLogprob]] = [[] for _ in self.sequences]
        self.results: list[list[RowResult]] = [[] for _ in self.sequences]
        shape = (len(self.sequences), executor.layout.num_groups, -(-max_len // executor.block_size))
        pool = np.random.default_rng(seed).permutation(executor.num_blocks)[: np.prod(shape)]
        self.tables = pool.reshape(shape).astype(np.int32)

    def row(self, index: int, chunk: int) -> ScheduledRow | None:
        """Return a row with the next `chunk` tokens of a sequence, or with fewer if fewer are left.

        The result is None if all tokens of the sequence are computed.
        """
        sequence, start = self.sequences[index], self.computed[index]
        count = min(chunk, sequence.num_tokens - start)
        end = start + count == sequence.num_tokens
        state = RowState(index) if self.executor.state_bytes else None
        return ScheduledRow(sequence, start, count, self.tables[index], sample=end, state=state) if count else None

    def rows(self, chunks: ListLike[int], offset: int = 0) -> list[tuple[int, ScheduledRow]]:
        """Return the rows of a step with the indices of their sequences.

        The row of sequence i has chunks[(i + offset) % len(chunks)] tokens.
        """
        made = [(i, self.row(i, chunks[(i + offset) % len(chunks)])) for i in range(len(self.sequences))]
        return [(index, row) for index, row in made if row is not None]

    def logits(self, chunks: ListLike[int]) -> list[torch.Tensor]:
        """Return the logits of all tokens of every sequence, computed in mixed steps."""
        found: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        offset = 0
        while step := self.rows(chunks, offset):
            logits = self.executor.logits([row for _, row in step])
            parts = logits.split([row.num_tokens for _, row in step])
            for (index, row), part in zip(step, parts, strict=True):
                found[index].append(part)
                self.computed[index] += row.num_tokens
            offset += 1
        return [torch.cat(parts) for parts in found]

    def step(self, chunks: ListLike[int], offset: int = 0, finished: ListLike[str] = ()) -> None:
        """Run one step, and append the sampled tokens to their sequences."""
        step = self.rows(chunks, offset)
        result = self.executor.execute(StepPlan([row for _, row in step], finished))
        for (index, row), found in zip(step, result.rows, strict=True):
            self.computed[index] += row.num_tokens
            self.prompt_logprobs[index] += found.prompt_logprobs
            self.results[index].append(found)
            if found.token_id is not None:
                self.sequences[index].token_ids.append(found.token_id)

    def generate(self, num_tokens: int, chunks: ListLike[int] = (1000,)) -> list[list[int]]:
        """Run until every sequence has `num_tokens` output tokens, and return the output tokens.

        A sequence that has enough tokens takes no part in the later steps.
        """
        offset = 0
        while waiting := [i for i, s in enumerate(self.sequences) if s.num_output_tokens < num_tokens]:
            self.computed = [
                count if index in waiting else sequence.num_tokens
                for index, (count, sequence) in enumerate(zip(self.computed, self.sequences, strict=True))
            ]
            self.step(chunks, offset)
            offset += 1
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in self.sequences]
