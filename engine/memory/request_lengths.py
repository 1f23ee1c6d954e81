"""How long requests are: a sample, or a mean and its coefficient of variation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

_POINTS = 4096


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request. Where prompts and outputs are not told apart, `outputs` is None and `prompts` all."""

    source: str
    prompts: Counts
    outputs: Counts | None = None

    @property
    def totals(self) -> Counts:
        return self.prompts if self.outputs is None else self.prompts + self.outputs

    @property
    def mean(self) -> float:
        return float(self.totals.mean())

    @property
    def variation(self) -> float:
        """Standard deviation / mean."""
        return float(self.totals.std() / self.totals.mean())

    def percentile(self, percent: float) -> int:
        """The least length that so many percent of requests do not exceed."""
        return int(np.quantile(self.totals, percent / 100, method="inverted_cdf"))

    def within(self, limit: int) -> Lengths | None:
        """Those of at most `limit` tokens, None if there are none."""
        kept = self.totals <= limit
        if not kept.any():
            return None
        return Lengths(self.source, self.prompts[kept], None if self.outputs is None else self.outputs[kept])


def lognormal_lengths(mean: float, variation: float) -> Lengths:
    """Totals of a log-normal distribution, at 4096 points of equal probability; `variation` is deviation / mean."""
    sigma = math.sqrt(math.log1p(variation**2))
    normal = NormalDist(math.log(mean) - sigma**2 / 2, max(sigma, 1e-12))
    points = [normal.inv_cdf((index + 0.5) / _POINTS) for index in range(_POINTS)]
    totals = np.maximum(1, np.rint(np.exp(points))).astype(np.int64)
    return Lengths(f"log-normal, mean {mean:g}, CV {variation:g}", totals)
