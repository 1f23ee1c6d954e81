"""The time of a step on a device that it was measured on: a few coefficients, fitted to measured steps.

    seconds = step + token x hypot(knee, tokens) + row x sampled rows + decode x decodes
              + decode_kv x KV tokens that decodes read
              + prefill_pair x (query, key) pairs of prefills + prefill_kv x KV tokens that prefills read
              + the same three for layers with a window, where there are some

All coefficients are seconds per unit and at least 0. `knee` is the number of tokens at which the matrix products cost
as much arithmetic as reading the weights: fewer take hardly less time, more take proportionally more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from llmsched.engine.executor.cost import StepShape


class FittedCost(NamedTuple):
    """A StepCost with the coefficients above; `window` is that of the model's windowed layers."""

    knee: float
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
        """Seconds of a step."""
        tokens, decodes, kv, prefill_kv, pairs, window_kv, window_prefill_kv, window_pairs, sampled = shape
        seconds = (
            self.step
            + self.token * math.hypot(self.knee, tokens + decodes)
            + self.row * sampled
            + self.decode * decodes
            + self.decode_kv * (kv - prefill_kv)
            + self.prefill_pair * pairs
            + self.prefill_kv * prefill_kv
        )
        if self.window is None:
            return seconds
        return (
            seconds
            + self.window_decode_kv * (window_kv - window_prefill_kv)
            + self.window_prefill_pair * window_pairs
            + self.window_prefill_kv * window_prefill_kv
        )


#: Coefficients that the time is linear in, in the order of `terms`; those of windowed layers last.
LINEAR = FittedCost._fields[1:-1]
NUM_PLAIN = LINEAR.index("window_decode_kv")


def terms(shape: StepShape, knee: float, windowed: bool) -> tuple[float, ...]:
    """What each coefficient of LINEAR is multiplied with."""
    found = (
        1.0,
        math.hypot(knee, shape.prefill_tokens + shape.decode_seqs),
        shape.sampled_rows,
        shape.decode_seqs,
        shape.kv_tokens - shape.prefill_kv_tokens,
        shape.prefill_pairs,
        shape.prefill_kv_tokens,
        shape.window_kv_tokens - shape.window_prefill_kv_tokens,
        shape.window_pairs,
        shape.window_prefill_kv_tokens,
    )
    return found if windowed else found[:NUM_PLAIN]


def fitted_cost(coefficients: Mapping[str, float], window: int | None) -> FittedCost:
    """The cost with these coefficients by name, as they lie in a calibration. Raises TypeError for a wrong name."""
    return FittedCost(**coefficients, window=window)
