"""Figures of the latest minute: which snapshots they compare, and quantiles of histograms."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engines import make_engine

from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.recent_stats import INTERVAL_S, WINDOW_S, RecentStats, quantile

TTFT = "time_to_first_token_seconds"


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=100.0)


def test_the_window_is_the_latest_minute(clock: SimpleNamespace) -> None:
    """One request per second: its TTFT is the second in which it arrived."""
    stats, metrics = make_engine().stats(), EngineMetrics("m", 16, 8)
    recent = RecentStats(lambda: replace(stats, steps=int(clock.now)), metrics, lambda: clock.now)
    for _ in range(300):
        clock.now += 1
        metrics.observe(TTFT, 0.2 if clock.now < 330 else 4.0)
        recent.sample()
        before, now = recent.window()
        assert now.time == now.stats.steps == clock.now
        assert now.time - before.time == pytest.approx(min(clock.now - 100, WINDOW_S), abs=INTERVAL_S)
        assert before.stats.steps == before.time
    # All samples of the window are 4 s; those of the first minutes no longer count.
    assert quantile(now.samples("ttft", before), 0.5) == pytest.approx(4, abs=1)
    assert quantile(now.samples("ttft", before), 0.01) == pytest.approx(4, abs=1)
    assert quantile(now.samples("itl", before), 0.5) is None


def test_nothing_happened_for_an_hour(clock: SimpleNamespace) -> None:
    stats, metrics = make_engine().stats(), EngineMetrics("m", 16, 8)
    recent = RecentStats(lambda: stats, metrics, lambda: clock.now)
    metrics.observe(TTFT, 1.0)
    for _ in range(3600):
        clock.now += 1
        recent.sample()
    before, now = recent.window()
    assert now.time - before.time == pytest.approx(WINDOW_S, abs=INTERVAL_S)
    assert quantile(now.samples("ttft", before), 0.5) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(seed: int) -> None:
    bounds = [0.01, 0.02, 0.05, 0.1, 0.5, 1.0]
    samples = np.random.default_rng(seed).lognormal(-3, 1, 500)
    buckets = {bound: float((samples <= bound).sum()) for bound in [*bounds, math.inf]}
    for share in (0.1, 0.5, 0.99):
        exact, found = float(np.quantile(samples, share)), quantile(buckets, share)
        assert found is not None
        assert np.searchsorted(bounds, found) == min(np.searchsorted(bounds, exact), len(bounds) - 1)
    assert quantile(dict.fromkeys(buckets, 0.0), 0.99) is None
