"""Prediction of output lengths, learned from outputs that have ended."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmsched.engine.config import Prediction
from llmsched.engine.request import FinishReason, Request

#: Ended outputs that are remembered per priority, and the number needed before they are trusted.
WINDOW = 512
MIN_SAMPLES = 16
#: Quantile of the longer outputs that is taken as the prediction.
QUANTILE = 0.65

_TOKEN_IDS, _PROMPT = attrgetter("token_ids"), attrgetter("num_prompt_tokens")


class Outlook(NamedTuple):
    """Lengths of n requests: their tokens now, how many of these are generated (`done`), and max_tokens (`limit`), each
    int64 [n]. `learned` has pairs: a mask (bool [n]) of requests, and the sorted lengths of ended outputs like theirs.
    """

    num_tokens: npt.NDArray[np.int64]
    done: npt.NDArray[np.int64]
    limit: npt.NDArray[np.int64]
    learned: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]]

    @property
    def most(self) -> npt.NDArray[np.int64]:
        """Most tokens [n] that each request may still generate, at least 1."""
        most: npt.NDArray[np.int64] = np.maximum(1, self.limit - self.done)
        return most

    def survival(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the probability [n, len(steps)] that each request still generates after so many more tokens.

        It is estimated from the samples: of the outputs that got as far, the share that got that much further.
        """
        length = self.done[:, None] + steps
        alive = (length <= self.limit[:, None]).astype(np.float64)
        for mask, ordered in self.learned:
            as_far = len(ordered) - np.searchsorted(ordered, self.done[mask], side="right")
            alive[mask] *= (len(ordered) - np.searchsorted(ordered, length[mask])) / as_far[:, None]
        return np.minimum(alive, 1.0)


class OutputPredictor:
    """Predicts the output length (tokens) of a request from the lengths of ended outputs of the same priority.

    The prediction is the QUANTILE of those outputs that were longer than what the request has generated already, at
    most its max_tokens. With too few samples, or if the request ignores end-of-sequence, it is max_tokens.
    """

    def __init__(self, method: Prediction) -> None:
        self._method = method
        self._recent: dict[int, deque[int]] = {}
        self._sorted: dict[int, list[int]] = {}

    def learn(self, request: Request) -> None:
        """Remember the output length of a request that has ended. Aborted and failed requests are ignored."""
        ended = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and request.num_output_tokens > 0
        if not ended or request.sampling.ignore_eos:
            return
        recent = self._recent.setdefault(request.priority, deque())
        ordered = self._sorted.setdefault(request.priority, [])
        recent.append(request.num_output_tokens)
        bisect.insort(ordered, request.num_output_tokens)
        if len(recent) > WINDOW:
            del ordered[bisect.bisect_left(ordered, recent.popleft())]

    def remaining(self, request: Request) -> int:
        """Return how many more tokens the request is expected to generate, at least 1."""
        limit, done = request.sampling.max_tokens, request.num_output_tokens
        ordered = self._sorted.get(request.priority, [])
        learned = self._method == "learned" and not request.sampling.ignore_eos
        if learned and len(ordered) >= MIN_SAMPLES and ordered[-1] > done:
            longer = bisect.bisect_right(ordered, done)
            limit = min(limit, ordered[longer + int(QUANTILE * (len(ordered) - longer - 1))])
        return max(1, limit - done)

    def outlook(self, requests: Sequence[Request]) -> Outlook:
        """Return what is known of the lengths of all these requests."""
        num_tokens = np.fromiter(map(len, map(_TOKEN_IDS, requests)), np.int64, len(requests))
        done = num_tokens - np.fromiter(map(_PROMPT, requests), np.int64, len(requests))
        limit = np.fromiter((request.sampling.max_tokens for request in requests), np.int64, len(requests))
        learned = []
        for priority, ordered in self._sorted.items():
            if self._method == "learned" and len(ordered) >= MIN_SAMPLES:
                alike = (request.priority == priority and not request.sampling.ignore_eos for request in requests)
                mask = np.fromiter(alike, np.bool_, len(requests)) & (done < ordered[-1])
                if mask.any():
                    learned.append((mask, np.array(ordered)))
        return Outlook(num_tokens, done, limit, learned)
