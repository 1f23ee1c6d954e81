"""Arrival times: every schedule has the rate that it should have over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmsched.cli.load.arrivals import Arrivals, Times
from llmsched.engine.errors import LlmschedError


def offsets(count: int | None = None, duration: float | None = None, seed: int = 0, **settings: Any) -> Times:
    return Arrivals(**settings).offsets(np.random.default_rng(seed), count, duration)


def variation(times: Times) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize(("burstiness", "expected"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gamma_gaps_have_the_rate_and_the_spread(burstiness: float, expected: float) -> None:
    times = offsets(50_000, rate=20.0, process="gamma", burstiness=burstiness)
    assert times[0] == 0
    assert (len(times) - 1) / times[-1] == pytest.approx(20, rel=0.03)
    assert variation(times) == pytest.approx(expected, rel=0.05)


def test_gamma_of_one_is_poisson() -> None:
    assert offsets(100, rate=2.0, process="gamma").tolist() == offsets(100, rate=2.0).tolist()


def test_a_duration_limits_the_offsets() -> None:
    times = offsets(duration=100, rate=50.0)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times[-1] < 100
    assert times.tolist() == offsets(len(times), rate=50.0).tolist()
    assert offsets(duration=3, rate=2.0, process="constant").tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert offsets(duration=1e-9, rate=2.0).tolist() == [0]


def test_count_and_duration_both_limit_the_requests() -> None:
    assert len(offsets(7, 100, rate=50.0)) == 7
    assert len(offsets(7, 0.02, rate=50.0, process="constant")) == 1 < 7
    assert offsets(7, 1e12, rate=50.0).tolist() == offsets(7, rate=50.0).tolist()


def test_a_ramp_takes_the_duration() -> None:
    """A ramp from 2/s to 10/s in 1,000 s: 6,000 requests, 2 x 500 + 8 x 500^2 / 2000 = 2,000 in the first half."""
    times = offsets(duration=1000, rate=2.0, process="ramp", ramp_to=10.0)
    assert len(times) == pytest.approx(6000, rel=0.05)
    assert np.count_nonzero(times < 500) == pytest.approx(2000, rel=0.08)


def test_a_ramp_without_duration_takes_all_requests_and_ends_at_its_rate() -> None:
    times = offsets(60_001, rate=10.0, process="ramp", ramp_to=2.0, burstiness=1000)
    assert times[-1] == pytest.approx(10_000, rel=0.01)
    assert np.count_nonzero(times > times[-1] - 100) / 100 == pytest.approx(2, rel=0.1)
    assert np.count_nonzero(times < 100) / 100 == pytest.approx(10, rel=0.05)


def test_day_and_night() -> None:
    """Rate 10 (1 - 0.8 cos): 2/s at night, 18/s half a period later, 10/s on average."""
    shape = {"rate": 10.0, "process": "daynight", "day_period": 1000.0}
    times = offsets(duration=4000, burstiness=1000, **shape)
    assert len(times) == pytest.approx(40_000, rel=0.01)

    def near(moment: float) -> float:
        return float(np.count_nonzero(abs(times - moment) < 25)) / 50

    assert [near(1000), near(1250), near(1500), near(2000)] == pytest.approx([2, 10, 18, 2], rel=0.08)
    assert variation(offsets(duration=4000, **shape)) > 1
    assert offsets(50, **shape, day_amplitude=1.0)[0] == 0


def test_offsets_ascend_and_are_the_same_for_the_same_seed() -> None:
    for settings in ({"process": "daynight", "burstiness": 0.3}, {"process": "ramp", "ramp_to": 9.0}, {}):
        times = offsets(500, rate=3.0, **settings)
        assert (np.diff(times) >= 0).all()
        assert times.tolist() == offsets(500, rate=3.0, **settings).tolist()
        assert times.tolist() != offsets(500, rate=3.0, seed=1, **settings).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"process": "tidal"}, "arrivals: 'tidal' is not one of poisson, gamma, constant, ramp, daynight"),
        ({"process": "gamma", "burstiness": 0}, "burstiness: 0 is out of range; allowed is 0.001 to 1000000"),
        ({"process": "gamma", "burstiness": float("nan")}, "burstiness: nan"),
        ({"burstiness": 2.0}, "burstiness: 2 has no effect with arrivals poisson"),
        ({"process": "constant", "burstiness": 2.0}, "burstiness: 2 has no effect with arrivals constant"),
        ({"process": "ramp"}, "go together"),
        ({"ramp_to": 2.0}, "go together"),
        ({"process": "ramp", "ramp_to": 0.0}, "ramp_to: 0"),
        ({"process": "daynight", "day_period": 0.0}, "day_period: 0"),
        ({"process": "daynight", "day_amplitude": 1.1}, "day_amplitude: 1.1"),
    ],
)
def test_bad_shapes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LlmschedError, match=message):
        Arrivals(1.0, **settings)
