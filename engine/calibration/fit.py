"""Fitting the coefficients of a FittedCost: least squares of relative errors, none below 0, held against itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmsched.engine.executor.cost import LINEAR, FittedCost, StepShape, terms

Array = npt.NDArray[np.float64]

#: Knees that are tried, in tokens; 0 is a straight line.
KNEES = (0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Sample(NamedTuple):
    """One measured step."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`errors` are (predicted - measured) / measured of the samples, `left_out` the same where each is predicted by a
    fit to all others.
    """

    cost: FittedCost
    errors: tuple[float, ...]
    left_out: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median size of an error on a step that was not fitted to."""
        return float(np.median(np.abs(self.left_out)))


def fit(samples: Sequence[Sample], window: int | None = None) -> Fit:
    """The cost that fits best: of all knees the one with the least mean error on steps that are left out."""
    fits = [_fit(samples, knee, window) for knee in KNEES]
    return min(fits, key=lambda each: float(np.mean(np.abs(each.left_out))))


def _fit(samples: Sequence[Sample], knee: float, window: int | None) -> Fit:
    seconds = np.array([sample.seconds for sample in samples])
    matrix = np.array([terms(sample.shape, knee, window is not None) for sample in samples])
    relative = matrix / seconds[:, None]
    coefficients = non_negative(relative)
    kept = ~np.eye(len(samples), dtype=bool)
    left_out = [float(row @ non_negative(relative[keep])) - 1 for row, keep in zip(relative, kept, strict=True)]
    named = dict(zip(LINEAR, coefficients.tolist(), strict=False))
    cost = FittedCost(knee=knee, **named, window=window)
    return Fit(cost, tuple((relative @ coefficients - 1).tolist()), tuple(left_out))


def non_negative(matrix: Array) -> Array:
    """The x >= 0 for which matrix @ x is nearest to all ones: of all subsets of columns the best that needs no sign.

    Exact, since the solution is the plain one of the columns that it uses; there are few enough to try them all.
    """
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    scaled = matrix / scale
    gram, moment = scaled.T @ scaled, scaled.sum(axis=0)
    best, least = np.zeros(matrix.shape[1]), float(len(matrix))
    used = [index for index in range(matrix.shape[1]) if scale[index] > 1e-300]
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            some = list(chosen)
            try:
                solution = np.linalg.solve(gram[np.ix_(some, some)], moment[some])
            except np.linalg.LinAlgError:
                continue  # columns that say the same: one of them alone is tried as well
            residual = len(matrix) - float(moment[some] @ solution)
            if solution.min() >= 0 and residual < least - 1e-12:
                best, least = np.zeros(matrix.shape[1]), residual
                best[some] = solution
    found: Array = best / scale
    return found
