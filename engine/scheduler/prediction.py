"""Prediction of output lengths from finished outputs, and of the largest number of KV blocks that will be in use."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from llmsched.engine.config import Prediction
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import FinishReason, Request

#: Number of finished outputs remembered per priority, and number needed to predict from them.
WINDOW = 512
MIN_SAMPLES = 16
#: Number of priorities remembered: those of the latest finished outputs. Clients may send any number as priority.
MAX_PRIORITIES = 64
#: The predicted length is this quantile of the lengths of longer finished outputs.
QUANTILE = 0.65
#: Standard deviations added to the mean number of held tokens.
RISK = 1.0
#: Number of future steps at which the expected peak is evaluated.
HORIZON_POINTS = 16

Tokens: TypeAlias = npt.NDArray[np.int64]

_TOKEN_IDS, _PROMPT = attrgetter("token_ids"), attrgetter("num_prompt_tokens")
_NOTHING: tuple[deque[int], list[int]] = (deque(), [])


class Outlook(NamedTuple):
    """Present lengths of n requests, and lengths of finished outputs from which their final lengths are predicted."""

    num_tokens: Tokens  # present lengths, int64 [n]
    done: Tokens  # generated tokens, int64 [n]
    limit: Tokens  # max_tokens, int64 [n]
    #: Per priority: mask (bool [n]) of its requests, and sorted lengths of finished outputs.
    learned: list[tuple[npt.NDArray[np.bool_], Tokens]]

    def survival(self, steps: Tokens) -> npt.NDArray[np.float64]:
        """Return the probability [n, len(steps)] that each request generates at least `steps` more tokens.

        Of the finished outputs longer than the request's present output, it is the share that were longer by at least
        `steps` tokens. A request without such outputs is assumed to run to max_tokens.
        """
        length = self.done[:, None] + steps
        alive = (length <= self.limit[:, None]).astype(np.float64)
        for mask, ordered in self.learned:
            as_far = len(ordered) - np.searchsorted(ordered, self.done[mask], side="right")
            alive[mask] *= (len(ordered) - np.searchsorted(ordered, length[mask])) / as_far[:, None]
        return np.minimum(alive, 1.0)


class OutputPredictor:
    """Predictor of a request's output length in tokens, from finished outputs of the same priority.

    The prediction is the quantile QUANTILE of the finished lengths that exceed the request's present output, at most
    max_tokens. It is max_tokens if too few outputs have finished, if none is longer, if the request ignores EOS tokens,
    or if `method` is not "learned".
    """

    def __init__(self, method: Prediction) -> None:
        self._method = method
        #: By priority: lengths in the order in which outputs finished, and sorted.
        self._lengths: dict[int, tuple[deque[int], list[int]]] = {}

    def learn(self, request: Request) -> None:
        """Remember a finished request's output length, unless the request was aborted, failed or ignores EOS tokens."""
        ended = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and request.num_output_tokens > 0
        if not ended or request.sampling.ignore_eos:
            return
        recent, ordered = self._lengths.pop(request.priority, (deque[int](), list[int]()))
        self._lengths[request.priority] = recent, ordered  # last, as the latest
        if len(self._lengths) > MAX_PRIORITIES:
            del self._lengths[next(iter(self._lengths))]
        recent.append(request.num_output_tokens)
        bisect.insort(ordered, request.num_output_tokens)
        if len(recent) > WINDOW:
            del ordered[bisect.bisect_left(ordered, recent.popleft())]

    def remaining(self, request: Request) -> int:
        """Return how many more tokens the request is predicted to generate, at least 1."""
        limit, done = request.sampling.max_tokens, request.num_output_tokens
        _, ordered = self._lengths.get(request.priority, _NOTHING)
        learned = self._method == "learned" and not request.sampling.ignore_eos
        if learned and len(ordered) >= MIN_SAMPLES and ordered[-1] > done:
            longer = bisect.bisect_right(ordered, done)
            limit = min(limit, ordered[longer + int(QUANTILE * (len(ordered) - longer - 1))])
        return max(1, limit - done)

    def outlook(self, requests: Sequence[Request]) -> Outlook:
        num_tokens = np.fromiter(map(len, map(_TOKEN_IDS, requests)), np.int64, len(requests))
        done = num_tokens - np.fromiter(map(_PROMPT, requests), np.int64, len(requests))
        limit = np.fromiter((request.sampling.max_tokens for request in requests), np.int64, len(requests))
        learned = []
        for priority in {request.priority for request in requests}:
            _, ordered = self._lengths.get(priority, _NOTHING)
            if self._method == "learned" and len(ordered) >= MIN_SAMPLES:
                alike = (request.priority == priority and not request.sampling.ignore_eos for request in requests)
                mask = np.fromiter(alike, np.bool_, len(requests)) & (done < ordered[-1])
                if mask.any():
                    learned.append((mask, np.array(ordered)))
        return Outlook(num_tokens, done, limit, learned)


def future_peak(held: Tokens, remaining: Tokens) -> int:
    """Return the most tokens that n sequences will hold at once, if each adds one token per step until it ends.

    `held` [n] is the number of tokens that each sequence holds now, and `remaining` [n] the number that it will still
    add. All layers must keep all tokens.
    """
    # If the sequences are sorted by remaining tokens, most first, the first i sequences still run when sequence i ends.
    # They then hold the tokens that they hold now plus i times the remaining tokens of sequence i (LightLLM's admission
    # rule).
    order = np.argsort(-remaining)
    counts = np.arange(1, len(order) + 1)
    return int((held[order].cumsum() + remaining[order] * counts).max())


def saturating_peak(held: Tokens, remaining: Tokens, layout: KVLayout) -> int:
    """Return the same peak as `future_peak(...)`, for any `layout`. Tokens are summed over layer groups."""
    size = layout.room(held[:, None] + remaining)
    return int((size * (remaining[:, None] >= remaining)).sum(axis=0).max())


def expected_peak(held: Tokens, alive: npt.NDArray[np.float64], steps: Tokens, layout: KVLayout) -> float:
    """Return the most tokens that n sequences are expected to hold together at any of the future `steps`.

    At each step, this is the mean plus RISK standard deviations. `held` [n] is the number of tokens that each sequence
    holds now. `alive` [n, len(steps)] is the probability that the sequence still runs after so many steps, assumed to
    be independent of the others. Tokens are summed over layer groups.
    """
    size = layout.room(held[:, None] + steps)
    mean = (alive * size).sum(axis=0)
    variance = (alive * (1 - alive) * size.astype(float) ** 2).sum(axis=0)
    return float((mean + RISK * np.sqrt(variance)).max())


def forecast_peak(kv: KVManager, predictor: OutputPredictor, request: Request, running: Sequence[Request]) -> int:
    """Return the largest number of blocks predicted to be in use if `request` is admitted and shares no block."""
    layout, tables = kv.layout, [other.table for other in running]
    held = np.array([*map(len, tables), layout.width(request.num_tokens)]) * layout.block_size
    others = kv.pool.num_used - sum(table.num_blocks for table in tables)
    outlook = predictor.outlook([*running, request])
    remaining = np.maximum(1, outlook.limit - outlook.done)
    longest = -(-np.maximum(held, outlook.num_tokens + remaining) // layout.block_size) * layout.block_size
    if (most := layout.width(int(layout.room(longest).sum())) + others) <= kv.pool.num_blocks:
        return most
    if outlook.learned:
        horizon = max(2, int((outlook.limit - outlook.done).max()))
        steps = np.unique(np.geomspace(1, horizon, HORIZON_POINTS).astype(np.int64))
        peak = expected_peak(held, outlook.survival(steps), steps, layout)
    else:
        growth = np.maximum(0, outlook.num_tokens + remaining - 1 - held)
        simple = layout.full_groups == layout.num_groups == 1
        peak = future_peak(held, growth) if simple else saturating_peak(held, growth, layout)
    return layout.width(int(peak)) + others
