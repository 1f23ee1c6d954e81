"""Samples that runs keep."""

from __future__ import annotations

import random

import pytest

from llmsched.cli.tune.trial_runs import MAX_SAMPLES, ThinnedSamples, pooled, thinned
from llmsched.engine.percentiles import statistic


def test_few_samples_are_all_kept() -> None:
    kept = thinned([0.3, 0.1, 0.2])
    assert kept == ThinnedSamples((0.1, 0.2, 0.3), 1, pytest.approx(0.6), 0.3)
    assert thinned([]) == ThinnedSamples()
    for name in ("p99", "mean", "max"):
        assert pooled([], name) is pooled([ThinnedSamples()], name) is None


def test_many_samples_keep_their_distribution() -> None:
    dice = random.Random(1)
    all_of_them = [dice.lognormvariate(0, 1) for _ in range(10_007)]
    kept = thinned(all_of_them)
    assert len(kept.values) <= MAX_SAMPLES
    assert pooled([kept], "max") == max(all_of_them)
    for name in ("p50", "p90", "p95", "p99", "mean"):
        assert pooled([kept], name) == pytest.approx(statistic(all_of_them, name), rel=0.02)


def test_a_thinned_run_weighs_what_it_had() -> None:
    """10,000 samples of 1 and 100 of 3: the median is 1, the mean slightly above."""
    together = [thinned([1.0] * 10_000), thinned([3.0] * 100)]
    assert pooled(together, "p50") == 1.0
    assert pooled(together, "mean") == pytest.approx(10_300 / 10_100)
