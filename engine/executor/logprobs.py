"""Log-probabilities of chosen tokens and of the best ones, as results."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike

import torch

from llmsched.engine.request import TokenLogprob


def pick(logprobs: torch.Tensor, token_ids: torch.Tensor, counts: ListLike[int]) -> list[TokenLogprob]:
    """For row i of logprobs [N, V] (fp32): token token_ids[i], and the counts[i] best ones."""
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
    """`pick` of the log-softmax of logits [N, V] (any dtype); no more than rows_at_once rows are fp32 at a time."""
    found: list[TokenLogprob] = []
    for low in range(0, len(counts), rows_at_once):
        part = slice(low, low + rows_at_once)
        found += pick(torch.log_softmax(logits[part].float(), dim=1), token_ids[part], counts[part])
    return found


def unusable(logprobs: ListLike[TokenLogprob]) -> bool:
    """Whether the model has computed something that is not a number."""
    return any(math.isnan(each.logprob) for each in logprobs)
