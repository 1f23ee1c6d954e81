from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmsched.cli.quantities import MOST_TOKENS
from llmsched.engine.errors import ConfigError

SYNTAX = "128, 64..512 (uniform), or lognormal:MEAN,SIGMA[,MAX] such as lognormal:512,1.0,4096"
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_LOGNORMAL = re.compile(r"lognormal:([^,]+),([^,]+)(?:,(\d+))?")


@dataclass(frozen=True, slots=True)
class RandomLengths:
    """Distribution of lengths in tokens: uniform if `mean` is None, else log-normal."""

    low: int
    high: int | None  # None: MOST_TOKENS
    mean: float | None = None  # before lengths are rounded and clipped
    sigma: float = 0.0  # standard deviation of the logarithm of a length

    def __str__(self) -> str:
        if self.mean is None:
            return f"{self.low}..{self.high}"
        return f"lognormal:{self.mean:g},{self.sigma:g}" + (f",{self.high}" if self.high is not None else "")

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        if self.mean is None:
            assert self.high is not None
            return generator.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)
        centre = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(generator.lognormal(centre, self.sigma, count))
        return np.clip(drawn, self.low, self.high or MOST_TOKENS).astype(np.int64)


def draw_lengths(lengths: int | RandomLengths, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.full(count, lengths) if isinstance(lengths, int) else lengths.draw(generator, count)


def parse_lengths(text: str, name: str) -> int | RandomLengths:
    """Parse lengths such as "128", "64..512" or "lognormal:512,1.0,4096" (see SYNTAX). Raises ConfigError."""
    found: RandomLengths | None = None
    if text.isascii() and text.isdigit():
        found = RandomLengths(int(text), int(text))
    elif match := _RANGE.fullmatch(text):
        found = RandomLengths(int(match[1]), int(match[2]))
    elif match := _LOGNORMAL.fullmatch(text):
        with suppress(ValueError):
            mean, sigma = float(match[1]), float(match[2])
            if 1 <= mean <= MOST_TOKENS and 0 <= sigma <= 5:
                found = RandomLengths(1, int(match[3]) if match[3] else None, mean, sigma)
    if found is None or not 1 <= found.low <= (MOST_TOKENS if found.high is None else found.high) <= MOST_TOKENS:
        raise ConfigError(name, f"{text!r} is not a length; allowed are 1 to {MOST_TOKENS} tokens: {SYNTAX}")
    return found.low if found.low == found.high else found
