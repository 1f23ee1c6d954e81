"""Parts of a step on their way through TorchExecutor: packed, launched, and collected."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmsched.engine.executor.base import RowResult, ScheduledRow
from llmsched.engine.executor.batch import PackedBatch
from llmsched.engine.executor.graphs import ModelInputs
from llmsched.engine.executor.sampler import PendingLogprobs, PendingSample, collect_logprobs
from llmsched.engine.executor.stopwatch import Stopwatch
from llmsched.engine.request import Sequence


class SampledTokens:
    """Ids of the tokens that one step samples, on the device. The sequences are known before their ids."""

    def __init__(self) -> None:
        self._places: dict[Sequence, int] = {}
        self._ids: list[torch.Tensor] = []

    def add_sequences(self, sequences: ListLike[Sequence]) -> None:
        """Add N sequences that the step continues."""
        for sequence in sequences:
            self._places[sequence] = len(self._places)

    def add_ids(self, token_ids: torch.Tensor) -> None:
        """Add the ids [N] of the next N sequences, in the order in which the sequences were added."""
        self._ids.append(token_ids)

    def places(self, sequences: ListLike[Sequence]) -> npt.NDArray[np.int64]:
        """Return the indices in `ids` of the tokens that continue `sequences`."""
        return np.array([self._places[sequence] for sequence in sequences], dtype=np.int64)

    def ids(self) -> torch.Tensor:
        """Return the ids of all sequences."""
        return self._ids[0] if len(self._ids) == 1 else torch.cat(self._ids)


class PackedPart(NamedTuple):
    """Part of a step (see `split`) whose arrays are in the StepBuffers.

    `indices` are the numbers of its rows in the step. `sampling` are the sequences of the rows that sample, with their
    `parameters` (see `Sampler.enqueue`). If rows end with pending tokens, `pending` has the indices of these tokens
    in `inputs.input_ids`, and their indices among the tokens that the step before sampled.
    """

    indices: ListLike[int]
    rows: ListLike[ScheduledRow]
    batch: PackedBatch
    inputs: ModelInputs
    sampling: list[Sequence]
    parameters: torch.Tensor | None = None
    pending: tuple[torch.Tensor, torch.Tensor] | None = None


class LaunchedPart(NamedTuple):
    """Part of a launched step (see `split`): the rows of the step with these `indices`.

    `sampling_rows` are the rows of the part that sample, and `sampled` has their tokens. The first `prompt_counts[0]`
    of the `prompt_logprobs` belong to row 0 of the part, the next `prompt_counts[1]` to row 1, and so on.
    """

    indices: ListLike[int]
    sampling_rows: list[int]
    sampled: PendingSample | None
    prompt_counts: list[int]
    prompt_logprobs: list[PendingLogprobs]

    def collect(self) -> list[RowResult]:
        """Wait for the device and return one result per row."""
        results = [RowResult() for _ in self.indices]
        if self.sampled is not None:
            for index, result in zip(self.sampling_rows, self.sampled.collect(), strict=True):
                results[index] = result
        found = collect_logprobs(self.prompt_logprobs)
        for result, end, count in zip(results, accumulate(self.prompt_counts), self.prompt_counts, strict=True):
            result.prompt_logprobs = found[end - count : end]
            if any(math.isnan(each.logprob) for each in result.prompt_logprobs):
                result.error = "the model computed logits that are not numbers for the prompt of this sequence"
        return results


class LaunchedStep(NamedTuple):
    """Step that the device may still be computing. `copies` are stopwatches of copies from and to host memory."""

    num_rows: int
    parts: list[LaunchedPart]
    stopwatch: Stopwatch
    copies: list[Stopwatch]
