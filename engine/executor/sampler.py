"""Sampling of the next token from each row of logits. Each row has its own parameters and does not affect others.

Log-probabilities are computed from the raw logits. Then logit_bias, min_tokens and penalties change the logits
(penalties.py). A greedy row takes the token with the highest logit, the lowest id of several equal ones. Other rows go
through the filters and the random draw (filters.py), whose key is (sequence.seed, number of output tokens so far). So
the draw does not depend on other rows, on chunking or on preemption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import numpy as np
import torch

from llmsched.engine.executor.base import RowResult
from llmsched.engine.executor.filters import Filters, draw
from llmsched.engine.executor.penalties import LogitEditor
from llmsched.engine.executor.rng import keys
from llmsched.engine.request import SamplingParams, Sequence, TokenLogprob

#: Rows with a lower temperature are greedy, because dividing by it would leave only the best token in fp32.
MIN_TEMPERATURE = 1e-5


def is_greedy(sampling: SamplingParams) -> bool:
    """Return True if the parameters leave only the best token to choose."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1


class Sampler:
    """Sampler of the next tokens of sequences. Its only state is the token counts of sequences with penalties."""

    def __init__(self) -> None:
        self._editor = LogitEditor()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of sequences that have ended."""
        self._editor.forget(request_ids)

    def sample(self, logits: torch.Tensor, sequences: ListLike[Sequence]) -> list[RowResult]:
        """Sample a token for each row of logits [R, V], which may be overwritten. Row i continues sequences[i].

        A row whose best logit is not finite gets an `error`. The ids in logit_bias must be below V.
        """
        logits = logits.float()
        raw_best, choice = logits.max(dim=1)
        best = raw_best
        with_logprobs = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        raw = torch.log_softmax(logits[with_logprobs], dim=1) if with_logprobs else None
        if any(self._editor.needs(sequence) for sequence in sequences):
            self._editor.edit(logits, sequences)
            best, choice = logits.max(dim=1)
        drawing = [row for row, sequence in enumerate(sequences) if not is_greedy(sequence.sampling)]
        if len(drawing) == len(sequences):
            choice = draw(logits, filters_of(sequences))
        elif drawing:
            choice[drawing] = draw(logits[drawing], filters_of([sequences[row] for row in drawing]))
        results = [
            result_of(token, raw_value, value)
            for token, raw_value, value in zip(choice.tolist(), raw_best.tolist(), best.tolist(), strict=True)
        ]
        if raw is not None:
            counts = [sequences[row].sampling.logprobs or 0 for row in with_logprobs]
            for row, found in zip(with_logprobs, pick(raw, choice[with_logprobs], counts), strict=True):
                results[row].logprob = found if results[row].error is None else None
        return results


def result_of(token: int, raw_best: float, best: float) -> RowResult:
    """Return a result with `token`, or with an error if `raw_best` or `best` is not finite.

    These are the largest logits before and after LogitEditor changed the logits.
    """
    if not math.isfinite(raw_best):
        return RowResult(error="the model computed no finite logits for this sequence (they are NaN or all -inf)")
    if not math.isfinite(best):
        message = "no token is left to sample: min_tokens forbids every token that the logits allow"
        return RowResult(error=message, caused_by_request=True)
    return RowResult(token_id=token)


def filters_of(sequences: ListLike[Sequence]) -> Filters:
    """Return the filter parameters of the given sequences, and the random keys for drawing their next tokens."""
    samplings = [sequence.sampling for sequence in sequences]
    settings = [(s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings]
    temperature, top_k, top_p, min_p = np.array(settings, dtype=np.float64).T
    words = keys([s.seed for s in sequences], [s.num_output_tokens for s in sequences])
    return Filters(temperature, top_k, top_p, min_p, words)


def pick(logprobs: torch.Tensor, token_ids: torch.Tensor, counts: ListLike[int]) -> list[TokenLogprob]:
    """Select log-probabilities from logprobs [N, V] (fp32), with one result per row.

    The result of row i has the log-probability of token_ids[i] and those of the counts[i] best tokens.
    """
    chosen = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token, logprob, count) in enumerate(zip(token_ids.tolist(), chosen, counts, strict=True))
    ]


def prompt_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: ListLike[int], rows_at_once: int
) -> list[TokenLogprob]:
    """Apply `pick` to the log-softmax of logits [N, V]. Only rows_at_once rows are converted to fp32 at a time."""
    found: list[TokenLogprob] = []
    for low in range(0, len(counts), rows_at_once):
        part = slice(low, low + rows_at_once)
        found += pick(torch.log_softmax(logits[part].float(), dim=1), token_ids[part], counts[part])
    return found
