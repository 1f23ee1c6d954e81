"""Fit of a FittedCost to measured steps by non-negative least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmsched.engine.executor.cost import LINEAR, FittedCost, StepShape, terms

Array = npt.NDArray[np.float64]

#: Values of FittedCost.knee to try, in tokens; 0 makes the time linear in the tokens.
KNEES = (0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class MeasuredStep(NamedTuple):
    shape: StepShape
    seconds: float  # median of several measurements
    name: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted cost and its relative errors, (predicted - measured) / measured, one for each step."""

    cost: FittedCost
    errors: tuple[float, ...]
    left_out: tuple[float, ...]  # errors in fits to all other steps (leave-one-out cross-validation)

    @property
    def error(self) -> float:
        """Median absolute relative error in leave-one-out cross-validation."""
        return float(np.median(np.abs(self.left_out)))


def fit(steps: Sequence[MeasuredStep], window: int | None = None) -> Fit:
    """Fit a FittedCost to measured steps. `window` is the model's sliding window in tokens; None: no sliding window."""
    fits = [_fit(steps, knee, window) for knee in KNEES]
    return min(fits, key=lambda each: float(np.mean(np.abs(each.left_out))))


def _fit(steps: Sequence[MeasuredStep], knee: float, window: int | None) -> Fit:
    seconds = np.array([step.seconds for step in steps])
    matrix = np.array([terms(step.shape, knee, window is not None) for step in steps])
    relative = matrix / seconds[:, None]
    coefficients = non_negative(relative)
    kept = ~np.eye(len(steps), dtype=bool)
    left_out = [float(row @ non_negative(relative[keep])) - 1 for row, keep in zip(relative, kept, strict=True)]
    named = dict(zip(LINEAR, coefficients.tolist(), strict=False))
    cost = FittedCost(knee=knee, **named, window=window)
    return Fit(cost, tuple((relative @ coefficients - 1).tolist()), tuple(left_out))


def non_negative(matrix: Array) -> Array:
    """Return the vector x >= 0 that minimises |matrix @ x - 1|."""
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
                continue  # some columns are equal; each is also tried without the others
            residual = len(matrix) - float(moment[some] @ solution)
            if solution.min() >= 0 and residual < least - 1e-12:
                best, least = np.zeros(matrix.shape[1]), residual
                best[some] = solution
    found: Array = best / scale
    return found
