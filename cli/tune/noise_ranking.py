"""Ranking of settings by their runs on a machine whose speed drifts.

All settings of a round served the same requests at nearly the same time, so the effect of the round can be removed. The
model is log(score) = effect of the setting + effect of the round + noise. It is fitted by least squares, and each run
is weighted by its number of requests (two-way layout with empty cells; Scheffe, The Analysis of Variance, 1959).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.trial_runs import TrialRun

#: Two scores count as equal if they differ by less than the standard error of the difference. The error is kept between
#: these shares of a score.
NOISE_FLOOR = 0.02
NOISE_CEILING = 0.04

#: A ranking is settled if, with 95 % confidence, no setting beats the `best` by more than this share.
REGRET = 0.03

#: Smallest standard deviation assumed for the log score of the longest runs, because a few repeats may agree by chance.
_LEAST_SIGMA = 0.003

#: Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}


class Ranking:
    """Ranking of settings by `effects`: logarithms of their scores, corrected for differences between rounds."""

    def __init__(
        self, runs: Sequence[TrialRun], score: Callable[[TrialRun], float | None], *, exact: bool = False
    ) -> None:
        """Rank all settings that have a run with a score. `exact` means that a repeated run gives the same score."""
        scored = [(run, value) for run in runs if (value := score(run)) is not None]
        zero = {run.setting for run, value in scored if value <= 0}
        scored = [(run, value) for run, value in scored if run.setting not in zero]
        settings = list(dict.fromkeys(run.setting for run, _ in scored))
        rounds = list(dict.fromkeys(run.round_index for run, _ in scored))
        columns = [[run.setting == setting for run, _ in scored] for setting in settings]
        columns += [[run.round_index == index for run, _ in scored] for index in rounds[1:]]
        design = np.array(columns, dtype=float).reshape(len(columns), len(scored)).T
        logs = np.array([math.log(value) for _, value in scored])
        weights = np.array([float(run.requests) for run, _ in scored])
        weights /= weights.max(initial=1.0)
        inverse = np.linalg.pinv(design.T @ (weights[:, None] * design))
        fit = inverse @ (design.T @ (weights * logs))
        residual = float((weights * (logs - design @ fit) ** 2).sum())
        self._exact = exact
        self._dof = len(logs) - int(np.linalg.matrix_rank(design)) if scored else 0
        self._covariance = inverse * max(residual / self._dof, _LEAST_SIGMA**2) if self._dof else None
        self._columns = {setting: index for index, setting in enumerate(settings)}
        self.effects: dict[Setting, float] = dict(zip(settings, fit.tolist(), strict=False)) | dict.fromkeys(
            zero, -math.inf
        )

    def level(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings whose scores are within the noise of the highest score, in the order given."""
        top = max(settings, key=self._effect)
        ahead = self._effect(top)
        return [s for s in settings if s == top or ahead - self._effect(s) <= -math.log1p(-self.noise(top, s))]

    def best(self, settings: Sequence[Setting]) -> Setting:
        """Return the first of the settings whose score is within the noise of the highest score."""
        return self.level(settings)[0]

    def ranked(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings by score, highest first, ignoring noise."""
        return sorted(settings, key=self._effect, reverse=True)

    def noise(self, one: Setting, other: Setting) -> float:
        """Return the share by which the scores of two settings must differ to count as different."""
        if self._exact:
            return NOISE_FLOOR
        return min(max(self._error(one, other), NOISE_FLOOR), NOISE_CEILING)

    def settled(self, settings: Sequence[Setting]) -> bool:
        """Return True if, with 95 % confidence, no score exceeds that of `best(settings)` by more than REGRET."""
        best = self.best(settings)
        quantile = _T95[max(dof for dof in _T95 if dof <= self._dof)] if self._dof else math.inf
        return all(
            self._effect(s) - self._effect(best) + quantile * self._error(s, best) < math.log1p(REGRET)
            for s in settings
            if s != best
        )

    def share(self, setting: Setting, of: Setting) -> float:
        return math.exp(self._effect(setting) - self._effect(of))

    def _effect(self, setting: Setting) -> float:
        return self.effects.get(setting, -math.inf)

    def _error(self, one: Setting, other: Setting) -> float:
        if one == other or one not in self._columns or other not in self._columns:
            return 0.0
        if (c := self._covariance) is None:
            return math.inf
        a, b = self._columns[one], self._columns[other]
        return math.sqrt(max(0.0, c[a, a] + c[b, b] - 2 * c[a, b]))
