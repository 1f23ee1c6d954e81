"""Samples that runs keep."""

from __future__ import annotations

import random

import pytest

from llmsched.cli.tune.trial_runs import (
    MAX_SAMPLES,
    ThinnedSamples,
    pooled,
    pooled_statistic,
    thinned,
)
from llmsched.engine.percentiles import statistic, summarise


def test_few_samples_are_all_kept() -> None:
    kept = thinned([0.3, 0.1, 0.2])
    assert kept == ThinnedSamples((0.1, 0.2, 0.3), 1, pytest.approx(0.6), 0.3)
    assert thinned([]) == ThinnedSamples()
    assert pooled([]).count == pooled([ThinnedSamples()]).count == 0
    assert pooled_statistic([ThinnedSamples()], "p99") is None


def test_many_samples_keep_their_distribution() -> None:
    dice = random.Random(1)
    all_of_them = [dice.lognormvariate(0, 1) for _ in range(10_007)]
    kept = thinned(all_of_them)
    assert len(kept.values) <= MAX_SAMPLES
    exact, about = summarise(all_of_them), pooled([kept])
    assert about.count == pytest.approx(exact.count, rel=0.002)
    assert about.max == exact.max
    for name in ("p50", "p95", "p99"):
        assert getattr(about, name) == pytest.approx(getattr(exact, name), rel=0.02)
    assert pooled_statistic([kept], "p90") == pytest.approx(statistic(all_of_them, "p90"), rel=0.02)


def test_a_thinned_run_weighs_what_it_had() -> None:
    """10,000 samples of 1 and 100 of 3: the median is 1, the mean slightly above."""
    together = pooled([thinned([1.0] * 10_000), thinned([3.0] * 100)])
    assert together.count == 10_100
    assert together.p50 == 1.0
    assert together.mean == pytest.approx(10_300 / 10_100)
