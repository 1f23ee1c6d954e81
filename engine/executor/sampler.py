"""Sampler of the next tokens. Each row of logits has its own parameters and does not affect other rows."""
# Log-probabilities are computed from the raw logits. Then logit_bias, min_tokens, penalties and grammars change the
# logits (penalties.py). Then `sample` (kernels/reference.py) takes the best token of a greedy row, and draws from the
# other rows. The key of a draw is (sequence.seed, number of output tokens so far). So the draw does not depend on other
# rows, on chunking or on preemption.

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike

import numpy as np
import numpy.typing as npt
import torch

from llmsched.engine.executor.base import RowResult
from llmsched.engine.executor.buffers import HostCopy, to_device
from llmsched.engine.executor.penalties import LogitEditor
from llmsched.engine.executor.rng import keys
from llmsched.engine.request import Sequence, TokenLogprob
from llmsched.engine.sampling_params import SamplingParams
from llmsched.kernels.dispatch import sample
from llmsched.kernels.reference import SamplingParameter

#: Rows with a lower temperature are greedy, because dividing by it would leave only the best token in fp32.
MIN_TEMPERATURE = 1e-5

#: Outcomes of rows that have no token: their best logit was not finite, before or after LogitEditor changed the logits.
NOT_FINITE, BARRED = -1, -2


def is_greedy(sampling: SamplingParams) -> bool:
    """Return True if the parameters leave only the best token to choose."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1


class PendingSample:
    """Sampled tokens that the device may still be computing."""

    def __init__(
        self,
        outcomes: torch.Tensor,
        sequences: ListLike[Sequence],
        logprobs: ListLike[PendingLogprobs],
        rows_with_logprobs: ListLike[int],
    ) -> None:
        #: Int64 [R], on the device; valid ids even for rows without a usable token.
        self.token_ids = outcomes.clamp(min=0)
        self._outcomes = HostCopy(outcomes)
        self._sequences = sequences
        self._logprobs = logprobs
        self._rows_with_logprobs = rows_with_logprobs

    def collect(self) -> list[RowResult]:
        results = list(map(result_of, self._outcomes.wait().tolist(), self._sequences))
        for row, found in zip(self._rows_with_logprobs, collect_logprobs(self._logprobs), strict=True):
            results[row].logprob = found if results[row].error is None else None
        return results


class Sampler:
    """Sampler of the next tokens of sequences."""

    def __init__(self, rows_at_once: int = 1 << 31) -> None:
        self._editor = LogitEditor()
        self._rows_at_once = rows_at_once  # limits the memory of fp32 copies of logits

    @property
    def mask_seconds(self) -> float:
        """Seconds that the host has spent on masks of grammars so far."""
        return self._editor.mask_seconds

    def forget(self, request_ids: Iterable[str]) -> None:
        self._editor.forget(request_ids)

    def enqueue(
        self, logits: torch.Tensor, sequences: ListLike[Sequence], parameters: torch.Tensor | None = None
    ) -> PendingSample:
        """Start to sample a token for each row of logits [R, V]. The logits may be overwritten.

        Row i continues sequences[i]. If the best logit of a row is not finite, the row's result is an error. Ids in
        logit_bias must be below V. `parameters` is a copy of `parameters_of(sequences)` on the device. None: the
        sampler makes the copy.
        """
        if parameters is None:
            parameters = to_device(parameters_of(sequences), logits.device)
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        if not rows and not any(self._editor.needs(sequence) for sequence in sequences):
            return PendingSample(sample(logits, parameters), sequences, [], rows)
        parts = [slice(low, low + self._rows_at_once) for low in range(0, len(sequences), self._rows_at_once)]
        outcomes, logprobs = zip(
            *(self._enqueue_part(logits[part], parameters[:, part], sequences[part]) for part in parts), strict=True
        )
        return PendingSample(torch.cat(outcomes), sequences, [each for each in logprobs if each is not None], rows)

    def _enqueue_part(
        self, logits: torch.Tensor, parameters: torch.Tensor, sequences: ListLike[Sequence]
    ) -> tuple[torch.Tensor, PendingLogprobs | None]:
        with_logprobs = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
        rows = to_device(np.array(with_logprobs, dtype=np.int64), logits.device)
        raw = torch.log_softmax(logits[rows].float(), dim=1) if with_logprobs else None
        if any(self._editor.needs(sequence) for sequence in sequences):
            usable = logits.amax(dim=1).isfinite()
            logits = logits.float()
            self._editor.edit(logits, sequences)
            outcomes = sample(logits, parameters)
            outcomes = torch.where(usable, torch.where(outcomes < 0, BARRED, outcomes), NOT_FINITE)
        else:
            outcomes = sample(logits, parameters)
        if raw is None:
            return outcomes, None
        counts = [sequences[row].sampling.logprobs or 0 for row in with_logprobs]
        return outcomes, PendingLogprobs(raw, outcomes[rows].clamp(min=0), counts)


def result_of(outcome: int, sequence: Sequence) -> RowResult:
    """Convert an outcome to a RowResult. An outcome is a token id, or a negative number that stands for an error."""
    if outcome == NOT_FINITE:
        return RowResult(error="the model computed no finite logits for this sequence (they are NaN or all -inf)")
    if outcome == BARRED:
        message = "no token is left to sample: min_tokens forbids every token that the logits allow"
        if (matcher := sequence.matcher) is not None:
            problem = "the logits of all tokens that the grammar of this request allows are -inf"
            message = f"no token is left to sample: {matcher.error or problem}"
        return RowResult(error=message, caused_by_request=True)
    return RowResult(token_id=outcome)


def parameters_of(sequences: ListLike[Sequence]) -> npt.NDArray[np.float64]:
    """Return sampling parameters [6, S] for the next tokens of S sequences: one row for each SamplingParameter."""
    samplings = [sequence.sampling for sequence in sequences]
    parameters = np.zeros((len(SamplingParameter), len(sequences)))
    settings = [(0.0 if is_greedy(s) else s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings]
    parameters[: SamplingParameter.KEY_0] = np.array(settings).T
    if parameters[SamplingParameter.TEMPERATURE].any():
        words = keys([s.seed for s in sequences], [s.num_output_tokens for s in sequences])
        parameters[SamplingParameter.KEY_0 :] = words
    return parameters


class PendingLogprobs:
    """Log-probabilities that are being copied to the host.

    For row i of `logprobs` [N, V] (fp32), these are the log-probabilities of token_ids[i] and of the counts[i] best
    tokens.
    """

    def __init__(self, logprobs: torch.Tensor, token_ids: torch.Tensor, counts: ListLike[int]) -> None:
        best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=1)
        chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
        self._copies = [HostCopy(tensor) for tensor in (token_ids, chosen, best.values, best.indices)]
        self._counts = counts

    def collect(self) -> list[TokenLogprob]:
        columns = zip(*(copy.wait().tolist() for copy in self._copies), self._counts, strict=True)
        return [
            TokenLogprob(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, values, ids, count in columns
        ]


def enqueue_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: ListLike[int], rows_at_once: int
) -> list[PendingLogprobs]:
    """Start to compute log-probabilities of some tokens in each row of logits [N, V].

    For row i, the tokens are token_ids[i] and the counts[i] best tokens. The rows are divided into parts of at most
    `rows_at_once` rows, with one PendingLogprobs for each part.
    """
    return [
        PendingLogprobs(torch.log_softmax(logits[part].float(), dim=1), token_ids[part], counts[part])
        for part in (slice(low, low + rows_at_once) for low in range(0, len(counts), rows_at_once))
    ]


def collect_logprobs(parts: ListLike[PendingLogprobs]) -> list[TokenLogprob]:
    return [found for part in parts for found in part.collect()]
