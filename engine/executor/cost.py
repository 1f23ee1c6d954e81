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
    """What the time of a step depends on: prefill tokens, decoding sequences, tokens of KV that attention reads."""

    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int


def shape_of(plan: StepPlan) -> StepShape:
    """The shape of a step; a row of one token counts as a decode."""
    decodes = sum(row.num_tokens == 1 for row in plan.rows)
    kv_tokens = sum(row.start + row.num_tokens for row in plan.rows)
    return StepShape(plan.num_tokens - decodes, decodes, kv_tokens)


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
        x = np.array([1.0, *shape]) / self._scale
        self._gram = self._gram * self._forget + np.outer(x, x)
        self._moment = self._moment * self._forget + x * seconds
        self._coefficients = None
        self.num_steps += 1

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes."""
        return float(self._fit() @ (np.array([1.0, *shape]) / self._scale))

    def prefill_tokens_within(self, seconds: float, decode_seqs: int, kv_tokens: int) -> int:
        """How many prefill tokens a step with these decodes can take in `seconds`; 0 if the decodes alone take that."""
        fit = self._fit()
        left = seconds - self.predict(StepShape(0, decode_seqs, kv_tokens))
        per_token = fit[1] / self._scale[1]
        return max(0, int(left / per_token)) if per_token > 0 else 1 << 30

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
