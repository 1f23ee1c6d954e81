"""Sampling of the next token from each row of logits. Each row has its own parameters and does not affect others.

Log-probabilities are computed from the raw logits. Then logit_bias, min_tokens and penalties change the logits
(penalties.py). A greedy row takes the token with the highest logit, the lowest id of several equal ones. Other rows go
through the filters and the random draw (filters.py), whose key is (sequence.seed, number of output tokens so far). So
the draw does not depend on other rows, on chunking or on preemption.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import numpy as np
import torch

from llmsched.engine.executor.base import RowResult
from llmsched.engine.executor.batch import HostCopy, to_device
from llmsched.engine.executor.filters import Filters, draw
from llmsched.engine.executor.penalties import LogitEditor
from llmsched.engine.executor.rng import keys
from llmsched.engine.request import SamplingParams, Sequence, TokenLogprob

#: Rows with a lower temperature are greedy, because dividing by it would leave only the best token in fp32.
MIN_TEMPERATURE = 1e-5


def is_greedy(sampling: SamplingParams) -> bool:
    """Return True if the parameters leave only the best token to choose."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1


class PendingSample:
    """Sampled tokens that the device may still be computing. Nothing here waits for the device except `collect`.

    `token_ids` [R] (int64, on the device) are the ids, row i those of sequences[i] of `Sampler.enqueue`. Each is a
    valid id, also in a row that failed, so that the next step can take its input from them before `collect`.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        outcomes: torch.Tensor,
        logprobs: ListLike[PendingLogprobs],
        rows_with_logprobs: ListLike[int],
    ) -> None:
        self.token_ids = token_ids
        self._outcomes = HostCopy(outcomes)
        self._logprobs = logprobs
        self._rows_with_logprobs = rows_with_logprobs

    def collect(self) -> list[RowResult]:
        """Wait for the device and return one result per row."""
        results = [result_of(outcome) for outcome in self._outcomes.wait().tolist()]
        for row, found in zip(self._rows_with_logprobs, collect_logprobs(self._logprobs), strict=True):
            results[row].logprob = found if results[row].error is None else None
        return results


class Sampler:
    """Sampler of the next tokens of sequences. Its only state is the token counts of sequences with penalties.

    `rows_at_once` is the number of rows of which it holds copies at a time.
    """

    def __init__(self, rows_at_once: int = 1 << 31) -> None:
        self._editor = LogitEditor()
        self._rows_at_once = rows_at_once

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of sequences that have ended."""
        self._editor.forget(request_ids)

    def enqueue(self, logits: torch.Tensor, sequences: ListLike[Sequence]) -> PendingSample:
        """Start to sample a token for each row of logits [R, V], R > 0, which may be overwritten.

        Row i continues sequences[i]. A row whose best logit is not finite will get an `error`. The ids in logit_bias
        must be below V.
        """
        parts = [slice(low, low + self._rows_at_once) for low in range(0, len(sequences), self._rows_at_once)]
        ids, outcomes, found = zip(*(self._enqueue_part(logits[p], sequences[p]) for p in parts), strict=True)
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        return PendingSample(torch.cat(ids), torch.cat(outcomes), [each for each in found if each is not None], rows)

    def _enqueue_part(
        self, logits: torch.Tensor, sequences: ListLike[Sequence]
    ) -> tuple[torch.Tensor, torch.Tensor, PendingLogprobs | None]:
        """Return token ids, outcomes (see `result_of`) and the log-probabilities of the rows that want them."""
        logits = logits.float()
        best, choice = logits.max(dim=1)
        usable = best.isfinite()
        with_logprobs = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        places = to_device(np.array(with_logprobs, dtype=np.int64), logits.device)
        raw = torch.log_softmax(logits[places], dim=1) if with_logprobs else None
        if edits := any(self._editor.needs(sequence) for sequence in sequences):
            self._editor.edit(logits, sequences)
            best, choice = logits.max(dim=1)
        drawing = [row for row, sequence in enumerate(sequences) if not is_greedy(sequence.sampling)]
        if len(drawing) == len(sequences):
            choice = draw(logits, filters_of(sequences))
        elif drawing:
            rows = to_device(np.array(drawing), logits.device)
            choice[rows] = draw(logits[rows], filters_of([sequences[row] for row in drawing]))
        outcomes = torch.where(usable, choice, NOT_FINITE)
        if edits:
            outcomes = torch.where(usable & ~best.isfinite(), BARRED, outcomes)
        if raw is None:
            return choice, outcomes, None
        counts = [sequences[row].sampling.logprobs or 0 for row in with_logprobs]
        return choice, outcomes, PendingLogprobs(raw, choice[places], counts)


#: Outcomes of rows that have no token: their best logit was not finite, before or after LogitEditor changed the logits.
NOT_FINITE, BARRED = -1, -2


def result_of(outcome: int) -> RowResult:
    """Return the result of a row. `outcome` is its token id, NOT_FINITE or BARRED."""
    if outcome == NOT_FINITE:
        return RowResult(error="the model computed no finite logits for this sequence (they are NaN or all -inf)")
    if outcome == BARRED:
        message = "no token is left to sample: min_tokens forbids every token that the logits allow"
        return RowResult(error=message, caused_by_request=True)
    return RowResult(token_id=outcome)


def filters_of(sequences: ListLike[Sequence]) -> Filters:
    """Return the filter parameters of the given sequences, and the random keys for drawing their next tokens."""
    samplings = [sequence.sampling for sequence in sequences]
    settings = [(s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings]
    temperature, top_k, top_p, min_p = np.array(settings, dtype=np.float64).T
    words = keys([s.seed for s in sequences], [s.num_output_tokens for s in sequences])
    return Filters(temperature, top_k, top_p, min_p, words)


class PendingLogprobs:
    """Log-probabilities of N tokens, selected on the device from logprobs [N, V] (fp32) and copied to the host.

    Row i has the log-probability of token_ids[i] and those of the counts[i] best tokens.
    """

    def __init__(self, logprobs: torch.Tensor, token_ids: torch.Tensor, counts: ListLike[int]) -> None:
        best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=1)
        chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
        self._copies = [HostCopy(tensor) for tensor in (token_ids, chosen, best.values, best.indices)]
        self._counts = counts

    def collect(self) -> list[TokenLogprob]:
        """Wait for the device and return one result per row."""
        columns = zip(*(copy.wait().tolist() for copy in self._copies), self._counts, strict=True)
        return [
            TokenLogprob(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, values, ids, count in columns
        ]


def enqueue_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: ListLike[int], rows_at_once: int
) -> list[PendingLogprobs]:
    """Start to compute PendingLogprobs under the log-softmax of logits [N, V].

    Each part of the result has rows_at_once rows, because only that many rows are converted to fp32 at a time.
    """
    return [
        PendingLogprobs(torch.log_softmax(logits[part].float(), dim=1), token_ids[part], counts[part])
        for part in (slice(low, low + rows_at_once) for low in range(0, len(counts), rows_at_once))
    ]


def collect_logprobs(parts: ListLike[PendingLogprobs]) -> list[TokenLogprob]:
    """Wait for the device and return the log-probabilities of all parts, one after the other."""
    return [found for part in parts for found in part.collect()]
