"""Concurrency of requests with mixed lengths: how many fit in a pool of blocks, and the probability of preemption."""
# The model assumes that running sequences are independent, and that each is at a random step of its run. A request with
# p prompt tokens and o output tokens runs for o steps, in which it holds p, p + 1, ... p + o - 1 tokens. So the
# probability that a running sequence belongs to this request is proportional to o. The number of blocks that n
# sequences hold is then a sum of n independent draws, whose distribution a convolution computes exactly.

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsched.engine.kv.layout import KVLayout

Counts = npt.NDArray[np.int64]
Masses = npt.NDArray[np.float64]

#: Number of points that represent a log-normal distribution.
_POINTS = 4096

#: Pools of more blocks are counted in units of several blocks, so that a convolution takes about a millisecond.
_MAX_UNITS = 1 << 14


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Lengths of n requests in tokens, int64 [n]."""

    source: str  # origin of the lengths, for reports
    prompts: Counts  # total lengths, if `outputs` is None
    outputs: Counts | None = None

    @property
    def totals(self) -> Counts:
        return self.prompts if self.outputs is None else self.prompts + self.outputs

    @property
    def mean(self) -> float:
        return float(self.totals.mean())

    @property
    def variation(self) -> float:
        """Standard deviation of the total lengths divided by their mean."""
        return float(self.totals.std() / self.totals.mean())

    def percentile(self, percent: float) -> int:
        """Return the smallest total length in tokens that at least `percent` % of the requests do not exceed."""
        return int(np.quantile(self.totals, percent / 100, method="inverted_cdf"))

    def within(self, limit: int) -> LengthDistribution | None:
        """Return the distribution without requests of more than `limit` tokens, or None if no request remains."""
        kept = self.totals <= limit
        if not kept.any():
            return None
        return LengthDistribution(self.source, self.prompts[kept], None if self.outputs is None else self.outputs[kept])


def lognormal_lengths(mean: float, variation: float) -> LengthDistribution:
    """Return total lengths in tokens with a log-normal distribution, as 4096 equally probable values.

    `variation` is the standard deviation divided by the mean.
    """
    sigma = math.sqrt(math.log1p(variation**2))
    normal = NormalDist(math.log(mean) - sigma**2 / 2, max(sigma, 1e-12))
    points = [normal.inv_cdf((index + 0.5) / _POINTS) for index in range(_POINTS)]
    totals = np.maximum(1, np.rint(np.exp(points))).astype(np.int64)
    return LengthDistribution(f"log-normal, mean {mean:g}, CV {variation:g}", totals)


class Occupancy:
    """Distribution of the number of blocks that running sequences hold, in a pool of `num_blocks` blocks."""

    def __init__(self, lengths: LengthDistribution, layout: KVLayout, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        unit = max(1, -(-num_blocks // _MAX_UNITS))
        self._units = num_blocks // unit
        masses: npt.NDArray[Any] = _held(lengths, layout)
        if unit > 1:  # divide each mass between the units below and above it, which keeps the mean
            whole, part = np.divmod(np.arange(len(masses)), unit)
            size, share = int(whole[-1]) + 2, part / unit
            masses = np.bincount(whole, masses * (1 - share), size) + np.bincount(whole + 1, masses * share, size)
        self._no_seqs: Masses = np.zeros(self._units + 1)
        self._no_seqs[0] = 1.0
        #: [k] is the distribution of the units that 2^k sequences hold, cut off at the pool's size.
        self._doubled = [np.pad(masses[: self._units + 1], (0, max(0, self._units + 1 - len(masses))))]

    def preemption_probability(self, num_seqs: int) -> float:
        """Return the probability that `num_seqs` running sequences need more blocks than the pool has."""
        total = self._no_seqs
        for power in range(num_seqs.bit_length()):
            if num_seqs >> power & 1:
                total = _sum(total, self._power(power))
        return _missing(total)

    def most_seqs(self, probability: float, limit: int) -> int:
        """Return the most running sequences (up to `limit`) whose `preemption_probability` is at most `probability`."""
        total, count = self._no_seqs, 0
        for power in reversed(range(limit.bit_length())):
            tried = _sum(total, self._power(power))
            if count + (1 << power) <= limit and _missing(tried) <= probability:
                total, count = tried, count + (1 << power)
        return count

    def _power(self, power: int) -> Masses:
        while len(self._doubled) <= power:
            self._doubled.append(_sum(self._doubled[-1], self._doubled[-1]))
        return self._doubled[power]


def _held(lengths: LengthDistribution, layout: KVLayout) -> Masses:
    """Return the probabilities that a sequence holds 0, 1, 2, ... blocks at a random step of its run."""
    outputs = np.ones_like(lengths.prompts) if lengths.outputs is None else lengths.outputs
    # The last token of a sequence is sampled but not computed, so it has no KV.
    first = np.maximum(1, lengths.prompts - 1) if lengths.outputs is None else lengths.prompts
    changes = np.zeros(int((first + outputs).max()) + 1, dtype=np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, first + outputs, -1)
    steps_with_tokens = np.cumsum(changes)
    width = -(-np.arange(len(steps_with_tokens)) // layout.block_size)
    blocks = layout.room(width * layout.block_size) // layout.block_size
    steps_with_blocks = np.bincount(blocks, weights=steps_with_tokens)
    return np.asarray(steps_with_blocks / steps_with_blocks.sum(), dtype=np.float64)


def _sum(one: Masses, other: Masses) -> Masses:
    size = 1 << (2 * len(one) - 1).bit_length()
    product = np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size), size)
    return np.asarray(np.clip(product[: len(one)], 0, None), dtype=np.float64)


def _missing(masses: Masses) -> float:
    missing = 1 - float(masses.sum())
    return missing if missing > 1e-12 else 0.0
