"""Chooses the next token of each row. Every parameter is per row; rows do not see each other.

Order: log-probabilities are taken from the raw logits; then logit_bias, min_tokens and penalties (`penalties`); of the
result, a greedy row takes the best token (the lowest id among equals), the others go through temperature, min_p, top_k,
top_p and the draw (`filters`). The draw's random key belongs to (sequence.seed, number of output tokens so far), so it
is the same alone, in any batch, for any chunking, and after preemption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import numpy as np
import torch

from llmsched.engine.executor import logprobs as lp
from llmsched.engine.executor.base import RowResult
from llmsched.engine.executor.filters import Filters, draw
from llmsched.engine.executor.penalties import LogitEditor
from llmsched.engine.executor.rng import keys
from llmsched.engine.request import SamplingParams, Sequence

#: A temperature below this is greedy: dividing by it would leave fp32 nothing but the best token anyway.
MIN_TEMPERATURE = 1e-5

_NOT_FINITE = "the model computed logits without a usable number for this sequence (NaN or all -inf)"
_ALL_BARRED = "no token is left to sample: min_tokens bars every token that the logits allow"


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether nothing but the best token can come out."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1


class Sampler:
    """Keeps token counts of the sequences that use penalties, and nothing else."""

    def __init__(self) -> None:
        self._editor = LogitEditor()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept of sequences that have ended."""
        self._editor.forget(request_ids)

    def sample(self, logits: torch.Tensor, sequences: ListLike[Sequence]) -> list[RowResult]:
        """One result for each row of logits [R, V], which are overwritten. Row i continues sequences[i].

        A row without a finite best logit gets an `error` and no token. Ids of logit_bias must be below V.
        """
        logits = logits.float()
        raw_best, choice = logits.max(dim=1)
        best = raw_best
        wanting = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        raw = torch.log_softmax(logits[wanting], dim=1) if wanting else None
        if any(self._editor.needs(sequence) for sequence in sequences):
            self._editor.edit(logits, sequences)
            best, choice = logits.max(dim=1)
        drawing = [row for row, sequence in enumerate(sequences) if not is_greedy(sequence.sampling)]
        if len(drawing) == len(sequences):
            choice = draw(logits, filters_of(sequences))
        elif drawing:
            choice[drawing] = draw(logits[drawing], filters_of([sequences[row] for row in drawing]))
        results = [
            judge(token, raw_value, value)
            for token, raw_value, value in zip(choice.tolist(), raw_best.tolist(), best.tolist(), strict=True)
        ]
        if raw is not None:
            counts = [sequences[row].sampling.logprobs or 0 for row in wanting]
            for row, found in zip(wanting, lp.pick(raw, choice[wanting], counts), strict=True):
                results[row].logprob = found if results[row].error is None else None
        return results


def judge(token: int, raw_best: float, best: float) -> RowResult:
    """The row's result, given its best logit as computed by the model and as edited."""
    if not math.isfinite(raw_best):
        return RowResult(error=_NOT_FINITE)
    if not math.isfinite(best):
        return RowResult(error=_ALL_BARRED)
    return RowResult(token_id=token)


def filters_of(sequences: ListLike[Sequence]) -> Filters:
    """The filters' parameters and the draw's keys of the given rows."""
    samplings = [sequence.sampling for sequence in sequences]
    settings = [(s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings]
    temperature, top_k, top_p, min_p = np.array(settings, dtype=np.float64).T
    words = keys([s.seed for s in sequences], [s.num_output_tokens for s in sequences])
    return Filters(temperature, top_k, top_p, min_p, words)
