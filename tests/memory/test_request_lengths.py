"""Lengths of requests as figures, and the log-normal."""

from __future__ import annotations

import numpy as np
import pytest

from llmsched.engine.memory.request_lengths import Lengths, lognormal_lengths


def test_percentiles_are_lengths_that_occur() -> None:
    lengths = Lengths("some", np.arange(1, 101))
    assert [lengths.percentile(percent) for percent in (50, 90, 95, 99, 100)] == [50, 90, 95, 99, 100]


def test_requests_beyond_a_limit_are_left_out() -> None:
    lengths = Lengths("some", np.array([374, 396, 879]), np.array([44, 109, 1]))
    kept = lengths.within(505)
    assert kept is not None
    assert kept.totals.tolist() == [418, 505]
    assert lengths.within(417) is None


@pytest.mark.parametrize(("mean", "variation"), [(1500, 0.5), (1500, 1.0), (300, 2.0), (8000, 0.0)])
def test_a_log_normal_has_the_mean_and_the_variation_asked_for(mean: float, variation: float) -> None:
    lengths = lognormal_lengths(mean, variation)
    assert lengths.mean == pytest.approx(mean, rel=0.02)
    assert lengths.variation == pytest.approx(variation, rel=0.12, abs=1e-3)
    assert lengths.totals.min() >= 1
