"""Lengths of synthetic prompts and answers: one number, a range, or a long tail."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmsched.cli.options.engine import MOST_TOKENS
from llmsched.engine.errors import ConfigError

SYNTAX = "128, 64..512 (uniform), or lognormal:MEAN,SIGMA[,MAX] such as lognormal:512,1.0,4096"
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_LOGNORMAL = re.compile(r"lognormal:([^,]+),([^,]+)(?:,(\d+))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    Uniform over low..high; with `mean` and `sigma` log-normal: the logarithm is normal with standard deviation `sigma`,
    and `mean` is the mean of the lengths before they are rounded and held within low..high.
    """

    low: int
    high: int | None
    mean: float | None = None
    sigma: float = 0.0

    def __str__(self) -> str:
        if self.mean is None:
            return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"
        return f"lognormal:{self.mean:g},{self.sigma:g}" + (f",{self.high}" if self.high is not None else "")

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` lengths."""
        if self.mean is None:
            assert self.high is not None
            return generator.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)
        centre = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(generator.lognormal(centre, self.sigma, count))
        return np.clip(drawn, self.low, self.high or MOST_TOKENS).astype(np.int64)


def fixed(length: int) -> Lengths:
    """The same length for all."""
    return Lengths(length, length)


def parse_lengths(text: str, name: str) -> int | Lengths:
    """The lengths that `text` stands for, in the SYNTAX above. Raises ConfigError of the setting `name`."""
    found: Lengths | None = None
    if text.isascii() and text.isdigit():
        found = fixed(int(text))
    elif match := _RANGE.fullmatch(text):
        found = Lengths(int(match[1]), int(match[2]))
    elif match := _LOGNORMAL.fullmatch(text):
        found = _lognormal(match)
    if found is None or not 1 <= found.low <= (MOST_TOKENS if found.high is None else found.high) <= MOST_TOKENS:
        raise ConfigError(name, f"{text!r} is no length; allowed are tokens, 1 to {MOST_TOKENS}: {SYNTAX}")
    return found.low if found.low == found.high else found


def _lognormal(match: re.Match[str]) -> Lengths | None:
    try:
        mean, sigma = float(match[1]), float(match[2])
    except ValueError:
        return None
    if not (1 <= mean <= MOST_TOKENS and 0 <= sigma <= 5):
        return None
    return Lengths(1, int(match[3]) if match[3] else None, mean, sigma)
