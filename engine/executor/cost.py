"""How long a step takes: fixed + prefill tokens + decode sequences + KV tokens read, fitted while serving."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from llmsched.engine.executor.base import StepPlan

#: Steps after which older ones count half.
HALF_LIFE = 200
#: Steps before the fit is trusted.
MIN_STEPS = 16


class StepShape(NamedTuple):
    """What the time of a step depends on; a row of one token counts as a decode, others are prefill.

    `kv_tokens` are the tokens of KV that attention reads for all rows, of which prefill rows read `prefill_kv_tokens`.
    `prefill_pairs` are (query, key) pairs of prefill rows: n tokens after s of context make n s + n (n + 1) / 2. The
    `window_` fields are the same for layers that see only the last `window` tokens; without a window they are equal.
    `sampled_rows` are the rows whose logits are computed.
    """

    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int
    prefill_kv_tokens: int = 0
    prefill_pairs: int = 0
    window_kv_tokens: int = 0
    window_prefill_kv_tokens: int = 0
    window_pairs: int = 0
    sampled_rows: int = 0


def shape_of(plan: StepPlan, window: int | None = None) -> StepShape:
    """The shape of a step, for a model whose windowed layers see `window` tokens (None: it has no such layers)."""
    tokens = decodes = sampled = decode_kv = prefill_kv = pairs = 0
    window_decode_kv = window_prefill_kv = window_pairs = 0
    for _, start, count, _, sample in plan.rows:
        end = start + count
        sampled += sample
        if count == 1:
            decodes += 1
            decode_kv += end
            if window is not None:
                window_decode_kv += min(end, window)
            continue
        tokens += count
        prefill_kv += end
        pairs += _pairs(start, count)
        if window is not None:
            window_prefill_kv += min(end, window + count - 1)
            window_pairs += _pairs(start, count) - _pairs(max(0, start - window), max(0, min(count, end - window)))
    if window is None:
        window_decode_kv, window_prefill_kv, window_pairs = decode_kv, prefill_kv, pairs
    return StepShape(
        prefill_tokens=tokens,
        decode_seqs=decodes,
        kv_tokens=decode_kv + prefill_kv,
        prefill_kv_tokens=prefill_kv,
        prefill_pairs=pairs,
        window_kv_tokens=window_decode_kv + window_prefill_kv,
        window_prefill_kv_tokens=window_prefill_kv,
        window_pairs=window_pairs,
        sampled_rows=sampled,
    )


def _pairs(start: int, count: int) -> int:
    """(query, key) pairs of `count` tokens after `start` of context, each of which sees itself and all before it."""
    return count * start + count * (count + 1) // 2


class StepTimeModel:
    """seconds = c0 + c1 x prefill_tokens + c2 x decode_seqs + c3 x kv_tokens, by least squares with forgetting.

    Coefficients are kept from going negative by a ridge towards the typical magnitudes of each term; the fit is a
    4 x 4 system, solved when asked for after new steps.
    """

    def __init__(self) -> None:
        self._scale = np.array([1.0, 1e3, 1e2, 1e5])
        self._gram = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._coefficients: np.ndarray | None = None
        self._forget = 0.5 ** (1 / HALF_LIFE)
        self.num_steps = 0

    @property
    def trusted(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Take in one measured step."""
        x = self._terms(shape)
        self._gram = self._gram * self._forget + np.outer(x, x)
        self._moment = self._moment * self._forget + x * seconds
        self._coefficients = None
        self.num_steps += 1

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        return float(self._fit() @ self._terms(shape))

    def prefill_tokens_within(self, seconds: float, decode_seqs: int, kv_tokens: int) -> int:
        """How many prefill tokens a step with these decodes can take in `seconds`; 0 if the decodes alone take that."""
        fit = self._fit()
        left = seconds - self.predict(StepShape(0, decode_seqs, kv_tokens))
        per_token = fit[1] / self._scale[1]
        return max(0, int(left / per_token)) if per_token > 0 else 1 << 30

    def _terms(self, shape: StepShape) -> np.ndarray:
        terms = np.array([1.0, shape.prefill_tokens, shape.decode_seqs, shape.kv_tokens])
        terms /= self._scale
        return terms

    def _fit(self) -> np.ndarray:
        """Non-negative least squares by dropping terms that come out negative, at most three times."""
        if self._coefficients is None:
            active = [0, 1, 2, 3]
            while True:
                gram = self._gram[np.ix_(active, active)] + 1e-6 * np.eye(len(active))
                solution = np.linalg.solve(gram, self._moment[active])
                if solution.min() >= 0 or len(active) == 1:
                    break
                active.remove(active[int(solution.argmin())])
            self._coefficients = np.zeros(4)
            self._coefficients[active] = np.maximum(solution, 0)
        return self._coefficients
