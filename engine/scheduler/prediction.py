"""How long outputs will be: learned from those that ended."""

from __future__ import annotations

import bisect
from collections import deque

from llmsched.engine.config import Prediction
from llmsched.engine.request import FinishReason, Request

#: Ended outputs that are remembered per priority, and how many there must be before they are trusted.
WINDOW = 512
MIN_SAMPLES = 32
#: Outputs are taken to be as long as this share of those that got as far.
QUANTILE = 0.8


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
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or request.sampling.ignore_eos:
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
        if self._method == "learned" and not request.sampling.ignore_eos:
            limit = min(limit, self._learned(request.priority, done) or limit)
        return max(1, limit - done)

    def _learned(self, priority: int, done: int) -> int | None:
        ordered = self._sorted.get(priority, [])
        longer = bisect.bisect_right(ordered, done)
        if len(ordered) < MIN_SAMPLES or longer == len(ordered):
            return None
        return ordered[longer + int(QUANTILE * (len(ordered) - longer - 1))]
