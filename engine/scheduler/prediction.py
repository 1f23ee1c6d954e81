"""How long outputs will be: learned from those that ended."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from llmsched.engine.config import Prediction
from llmsched.engine.request import FinishReason, Request

#: Ended outputs that are remembered per priority, and how many there must be before they are trusted.
WINDOW = 512
MIN_SAMPLES = 16
#: Outputs are taken to be as long as this share of those that got as far.
QUANTILE = 0.65


class OutputPredictor:
    """Predicts the output length (tokens) of a request from the lengths of ended outputs of the same priority.

    The prediction is the QUANTILE of those outputs that were longer than what the request has already, never more than
    its max_tokens; with too few samples, or where end-of-sequence is ignored, it is max_tokens.
    """

    def __init__(self, method: Prediction) -> None:
        self._method = method
        self._recent: dict[int, deque[int]] = {}
        self._sorted: dict[int, list[int]] = {}

    def learn(self, request: Request) -> None:
        """Remember the output of a request that has ended; one that was cut short says nothing."""
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
        """Tokens that the request is expected to generate still, at least 1."""
        limit = request.sampling.max_tokens
        done = request.num_output_tokens
        if (ordered := self._samples(request)) is not None:
            longer = bisect.bisect_right(ordered, done)
            limit = min(limit, ordered[longer + int(QUANTILE * (len(ordered) - longer - 1))])
        return max(1, limit - done)

    def knows(self, request: Request) -> bool:
        """Whether there is more to say about the request's length than its max_tokens."""
        return self._samples(request) is not None

    def survival(self, requests: Sequence[Request], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Probability [len(requests), len(steps)] that each request still generates after so many more tokens.

        From the samples: of those that got as far, the share that got further by that much.
        """
        alive = np.empty((len(requests), len(steps)))
        arrays = {priority: np.array(ordered) for priority, ordered in self._sorted.items()}
        for row, request in zip(alive, requests, strict=True):
            length = request.num_output_tokens + steps
            row[:] = length <= request.sampling.max_tokens
            if (ordered := self._samples(request)) is not None:
                as_far = len(ordered) - bisect.bisect_right(ordered, request.num_output_tokens)
                row *= (len(ordered) - np.searchsorted(arrays[request.priority], length)) / as_far
        return np.minimum(alive, 1.0)

    def _samples(self, request: Request) -> list[int] | None:
        """Sorted lengths of comparable outputs, some of them longer than the request's; None if it is all guesswork."""
        if self._method != "learned" or request.sampling.ignore_eos:
            return None
        ordered = self._sorted.get(request.priority, [])
        if len(ordered) < MIN_SAMPLES or ordered[-1] <= request.num_output_tokens:
            return None
        return ordered
