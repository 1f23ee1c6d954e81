"""Models that predict the time of a step from its StepShape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from llmsched.engine.executor.base import StepPlan

#: Number of steps of one shape after which the weight of an earlier one in the fit of StepTimeModel has halved.
HALF_LIFE = 200
#: StepTimeModel is fitted again after every step at first, and later after every REFIT-th.
REFIT = 4
#: Number of steps before the fit of StepTimeModel is trusted.
MIN_STEPS = 4


class StepShape(NamedTuple):
    """Quantities on which the time of a step depends. A row of one token is a decode, any other row a prefill."""

    prefill_tokens: int
    decode_seqs: int
    kv_tokens: int  # KV tokens that attention reads, summed over all rows
    prefill_kv_tokens: int = 0  # the same, summed over prefill rows
    prefill_pairs: int = 0  # (query, key) pairs of prefills: n s + n (n + 1) / 2 for n tokens after s tokens
    window_kv_tokens: int = 0  # this and the next two are the numbers for sliding-window layers
    window_prefill_kv_tokens: int = 0
    window_pairs: int = 0
    sampled_rows: int = 0


def shape_of(plan: StepPlan, window: int | None = None) -> StepShape:
    """Return the shape of a step. `window` is the model's sliding window in tokens; None: no sliding window."""
    tokens = decodes = sampled = decode_kv = prefill_kv = pairs = 0
    window_decode_kv = window_prefill_kv = window_pairs = 0
    for _, start, count, _, sample, _, _ in plan.rows:
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


def decode_shape(ends: Sequence[int], window: int | None = None) -> StepShape:
    """Return the shape of a step of decodes. Decode i extends its KV to `ends[i]` tokens, and reads them."""
    kv = sum(ends)
    window_kv = kv if window is None else sum(min(end, window) for end in ends)
    return StepShape(0, len(ends), kv, window_kv_tokens=window_kv, sampled_rows=len(ends))


def _pairs(start: int, count: int) -> int:
    return count * start + count * (count + 1) // 2


class StepCost(Protocol):
    """Interface of models that predict the time of a step."""

    @property
    def window(self) -> int | None: ...

    def seconds(self, shape: StepShape) -> float: ...


class FittedCost(NamedTuple):
    """StepCost that was fitted to measured steps. `knee` is in tokens, all other coefficients in seconds per unit.

    seconds = step + token x hypot(knee, tokens) + row x sampled rows + decode x decodes
              + decode_kv x KV tokens that decodes read
              + prefill_pair x (query, key) pairs of prefills + prefill_kv x KV tokens that prefills read
              + three more terms like the last three, for layers with a sliding window
    """

    knee: float  # number of tokens whose matrix products take as long as reading the weights
    step: float
    token: float
    row: float
    decode: float
    decode_kv: float
    prefill_pair: float
    prefill_kv: float
    window_decode_kv: float = 0.0
    window_prefill_pair: float = 0.0
    window_prefill_kv: float = 0.0
    window: int | None = None

    def seconds(self, shape: StepShape) -> float:
        total = 0.0
        for coefficient, term in zip(self[1:-1], terms(shape, self.knee, self.window is not None), strict=False):
            total += coefficient * term
        return total


#: Names of FittedCost's linear coefficients, in the order of `terms`. Those of sliding-window layers come last.
LINEAR = FittedCost._fields[1:-1]


def terms(shape: StepShape, knee: float, windowed: bool) -> tuple[float, ...]:
    """Return the quantities by which FittedCost multiplies its coefficients, in the order of the coefficients.

    If `windowed` is False, the quantities of sliding-window layers, which are last, are left out.
    """
    prefill_tokens, decodes, kv, prefill_kv, pairs, window_kv, window_prefill_kv, window_pairs, sampled = shape
    plain = (1.0, math.hypot(knee, prefill_tokens + decodes), sampled, decodes, kv - prefill_kv, pairs, prefill_kv)
    return (*plain, window_kv - window_prefill_kv, window_pairs, window_prefill_kv) if windowed else plain


class StepTimeModel:
    """Model of the time of a step, fitted by least squares to the steps of the running engine:

    seconds = c0 + c1 x prefill_tokens + c2 x decode_seqs + c3 x kv_tokens (+ c4 if it has drafts)

    A draft token counts as one more decode, because its matrix products and its sampling take as long. A step replaces
    only what earlier steps said about its own shape. So after any number of decodes, the model still knows how long
    prefills take.
    """

    def __init__(self) -> None:
        # Steps of one shape do not determine all terms. The fit attributes their time first to the terms with large
        # scales. So the first guess of the time of decodes alone is low, which makes the next step differ.
        self._scale = np.array([1.0, 32.0, 1e2, 1e5, 1e2])
        self._sums = np.zeros((5, 6))  # of the normal equations: the matrix, and the right-hand side as last column
        self._coefficients: np.ndarray | None = None
        self._forget = 1 - 0.5 ** (1 / HALF_LIFE)
        self.num_steps = 0

    @property
    def trusted(self) -> bool:
        return self.num_steps >= MIN_STEPS

    def learn(self, shape: StepShape, seconds: float, *, drafts: bool = False) -> None:
        x = self._terms(shape, drafts)
        known = x @ self._sums
        if (weight := float(known[:-1] @ x)) > 0:
            # Directional forgetting (Cao and Schwartz, Automatica 36, 2000) leaves the solution of the fit as it is.
            self._sums -= (known[:-1, None] * (self._forget / weight)) * known
        self._sums += x[:, None] * np.append(x, seconds)
        self.num_steps += 1
        if self.num_steps < 8 * REFIT or self.num_steps % REFIT == 0:
            self._coefficients = None

    def predict(self, shape: StepShape, *, drafts: bool = False) -> float:
        return float(self._fit() @ self._terms(shape, drafts))

    def prefill_tokens_within(self, seconds: float, decode_seqs: int, kv_tokens: int) -> int:
        """Return how many prefill tokens fit into a step of `seconds` seconds beside its decodes.

        The decodes are `decode_seqs` sequences that together read `kv_tokens` tokens of KV. Returns 0 if the decodes
        alone take `seconds` or more.
        """
        fit = self._fit()
        left = seconds - self.predict(StepShape(0, decode_seqs, kv_tokens))
        per_token = fit[1] / self._scale[1]
        return max(0, int(left / per_token)) if per_token > 0 else 1 << 30

    def _terms(self, shape: StepShape, drafts: bool) -> np.ndarray:
        terms = np.array([1.0, shape.prefill_tokens, shape.decode_seqs, shape.kv_tokens, drafts])
        terms /= self._scale
        return terms

    def _fit(self) -> np.ndarray:
        """Return the five coefficients of the formula, all of them 0 or more."""
        # The fit is repeated without the term of the most negative coefficient until no coefficient is negative.
        if self._coefficients is None:
            active = [0, 1, 2, 3, 4]
            while True:
                matrix = self._sums[np.ix_(active, active)] + 1e-6 * np.eye(len(active))
                solution = np.linalg.solve(matrix, self._sums[active, -1])
                if solution.min() >= 0 or len(active) == 1:
                    break
                active.remove(active[int(solution.argmin())])
            self._coefficients = np.zeros(5)
            self._coefficients[active] = np.maximum(solution, 0)
        return self._coefficients
