"""Data of a step, from the time that TorchExecutor packs it until its results are collected."""

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
    """Tokens that one step samples. Their ids stay on the device, so that the next step can read them there."""

    def __init__(self) -> None:
        self._places: dict[Sequence, int] = {}
        self._ids: list[torch.Tensor] = []

    def add_sequences(self, sequences: ListLike[Sequence]) -> None:
        for sequence in sequences:
            self._places[sequence] = len(self._places)

    def add_ids(self, token_ids: torch.Tensor) -> None:
        """Add the token ids [N] of the next N sequences, in the order in which `add_sequences(...)` got them."""
        self._ids.append(token_ids)

    def places(self, sequences: ListLike[Sequence]) -> npt.NDArray[np.int64]:
        """Return, for each sequence, the index of its token in `ids()`."""
        return np.array([self._places[sequence] for sequence in sequences], dtype=np.int64)

    def ids(self) -> torch.Tensor:
        return self._ids[0] if len(self._ids) == 1 else torch.cat(self._ids)


class PackedPart(NamedTuple):
    """Part of a step whose inputs have been written to the StepBuffers."""

    indices: ListLike[int]  # numbers of the rows in the step
    rows: ListLike[ScheduledRow]
    batch: PackedBatch
    inputs: ModelInputs
    sampling: list[Sequence]  # sequences for `batch.sampling_rows`, as they are when their tokens are sampled
    parameters: torch.Tensor | None = None  # see `Sampler.enqueue`
    #: Indices of pending tokens in input_ids, and in the tokens that the previous step sampled.
    pending: tuple[torch.Tensor, torch.Tensor] | None = None


class LaunchedPart(NamedTuple):
    """Part of a step that the device may still be computing."""

    indices: ListLike[int]  # numbers of the rows in the step
    sampling_rows: list[int]  # see PackedBatch
    sampled: PendingSample | None  # their tokens
    prompt_counts: list[int]  # how many of the `prompt_logprobs` belong to each row
    prompt_logprobs: list[PendingLogprobs]

    def collect(self) -> list[RowResult]:
        results = [RowResult() for _ in self.indices]
        if self.sampled is not None:
            previous = -1
            for index, result in zip(self.sampling_rows, self.sampled.collect(), strict=True):
                if index == previous:  # after a token of the draft
                    results[index].more = [*results[index].more, result]
                else:
                    results[index] = result
                previous = index
        found = collect_logprobs(self.prompt_logprobs)
        for result, end, count in zip(results, accumulate(self.prompt_counts), self.prompt_counts, strict=True):
            result.prompt_logprobs = found[end - count : end]
            if any(math.isnan(each.logprob) for each in result.prompt_logprobs):
                result.error = "the model computed logits that are not numbers for the prompt of this sequence"
        return results


class LaunchedStep(NamedTuple):
    """Step that the device may still be computing."""

    num_rows: int
    parts: list[LaunchedPart]
    stopwatch: Stopwatch
    copies: list[Stopwatch]  # of copies from and to host memory
