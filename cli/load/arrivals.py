"""Arrival times by time rescaling: times of arrivals at a mean rate of 1 are drawn and stretched to the actual rate.

Request k is due when the integral of the actual rate equals the k-th drawn time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llmsched.engine.errors import ConfigError, check_range, setting

ArrivalProcess = Literal["poisson", "gamma", "constant", "ramp", "daynight"]
Times = NDArray[np.float64]

#: Defaults of "daynight": the period in seconds, and the amplitude of the rate as a share of its mean.
DAY_PERIOD, DAY_AMPLITUDE = 600.0, 0.8
#: Lowest rate in requests per second (one request in 31 years). It keeps the times of a million requests finite.
LEAST_RATE = 1e-9

#: Bisection steps. They find any time of a schedule with an error far below a microsecond.
_HALVINGS = 64


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Schedule of random arrivals. Raises ConfigError for an invalid setting."""

    rate: float  # mean in requests per second, or the rate at the start of a ramp
    process: ArrivalProcess = "poisson"
    burstiness: float = 1.0  # gaps are gamma distributed with a coefficient of variation of 1 / sqrt(burstiness)
    ramp_to: float | None = None  # rate at the end of a ramp
    day_period: float = DAY_PERIOD  # seconds from peak to peak of "daynight", whose rate follows a cosine
    day_amplitude: float = DAY_AMPLITUDE  # largest deviation of the rate of "daynight", as a share of `rate`

    def __post_init__(self) -> None:
        if self.process not in get_args(ArrivalProcess):
            raise ConfigError("arrivals", f"{self.process!r} is not one of {', '.join(get_args(ArrivalProcess))}")
        check_range("burstiness", self.burstiness, 1e-3 <= self.burstiness <= 1e6, "0.001 to 1000000 (1 is Poisson)")
        if self.burstiness != 1 and self.process in ("poisson", "constant"):
            raise ConfigError(
                "burstiness",
                f"{self.burstiness:g} has no effect with {setting('arrivals')} {self.process}; "
                "allowed is gamma, ramp or daynight",
            )
        if (self.process == "ramp") != (self.ramp_to is not None):
            raise ConfigError(
                "arrivals", f"ramp and {setting('ramp_to')} (requests per second at the end) go together; give both"
            )
        if self.ramp_to is not None:
            valid = LEAST_RATE <= self.ramp_to < math.inf
            check_range("ramp_to", self.ramp_to, valid, f"{LEAST_RATE:g} or more requests per second")
        if self.process != "daynight" and (self.day_period, self.day_amplitude) != (DAY_PERIOD, DAY_AMPLITUDE):
            raise ConfigError(
                "arrivals",
                f"{setting('day_period')} and {setting('day_amplitude')} have an effect only with daynight, not with "
                f"{self.process}; leave them out",
            )
        check_range("day_period", self.day_period, 1e-3 <= self.day_period < math.inf, "0.001 s or more")
        check_range("day_amplitude", self.day_amplitude, 0 <= self.day_amplitude <= 1, "0 to 1")

    @property
    def mean_rate(self) -> float:
        """Mean requests per second over a whole ramp or over a whole period of "daynight"."""
        return self.rate if self.ramp_to is None else (self.rate + self.ramp_to) / 2

    def describe(self) -> str:
        burst = "" if self.burstiness == 1 else f" (burstiness {self.burstiness:g})"
        if self.process == "ramp":
            return f"arrivals that ramp from {self.rate:g} to {self.ramp_to:g} requests/s{burst}"
        if self.process == "daynight":
            low, high = (self.rate * (1 + sign * self.day_amplitude) for sign in (-1, 1))
            return f"arrivals between {low:g} and {high:g} requests/s every {self.day_period:g} s{burst}"
        return f"{self.process} arrivals at {self.rate:g} requests/s{burst}"

    def expected(self, duration: float) -> float:
        """Return the expected number of requests in the first `duration` seconds. A ramp takes `duration` seconds."""
        return float(self._integral(np.array([duration]), duration)[0])

    def offsets(self, generator: np.random.Generator, count: int | None, duration: float | None) -> Times:
        """Return the times of requests in seconds after the start, in ascending order from 0.

        At most `count` requests are due, all before `duration` seconds; `count` or `duration` may be None. A ramp ends
        at `duration` or, without a duration, at the time at which the last request is expected.
        """
        if duration is None:
            if count is None:
                raise ValueError("a schedule needs a count or a duration")
            ramp = 2 * max(1, count - 1) / (self.rate + (self.ramp_to or self.rate))
            return self._stretch(self._unit_times(generator, count), ramp)
        end, most = self.expected(duration), math.inf if count is None else count
        state, drawn = generator.bit_generator.state, min(end + 16, most)
        while (units := self._unit_times(generator, int(drawn)))[-1] < end and drawn < most:
            generator.bit_generator.state = state
            drawn = min(2 * drawn, most)
        due = self._stretch(units, duration)
        return due[due < duration][:count]

    def _unit_times(self, generator: np.random.Generator, count: int) -> Times:
        """Return the times of `count` arrivals at a mean rate of 1, in ascending order from 0."""
        if self.process == "constant":
            return np.arange(count, dtype=np.float64)
        gaps = max(0, count - 1)
        if self.burstiness == 1:
            drawn = generator.exponential(1.0, gaps)
        else:
            drawn = generator.gamma(self.burstiness, 1 / self.burstiness, gaps)
        return np.concatenate([np.zeros(min(count, 1)), np.cumsum(drawn)])

    def _integral(self, times: Times, ramp: float) -> Times:
        """Return the integral of the rate from 0 to each of `times` (seconds). A ramp takes `ramp` seconds."""
        if self.ramp_to is not None:
            inside = np.minimum(times, ramp)
            risen = self.rate * inside + (self.ramp_to - self.rate) * inside**2 / (2 * ramp)
            return risen + self.ramp_to * (times - inside)
        if self.process == "daynight":
            turn = 2 * math.pi / self.day_period
            return self.rate * (times - self.day_amplitude * np.sin(turn * times) / turn)
        return self.rate * times

    def _stretch(self, units: Times, ramp: float) -> Times:
        """Return the times at which the integral of the rate equals `units`. A ramp takes `ramp` seconds."""
        if self.process not in ("ramp", "daynight"):
            return units / self.rate
        last = float(units[-1]) if len(units) else 0.0
        if self.process == "daynight":
            latest = last / self.rate + self.day_period
        else:
            latest = ramp + last / min(self.rate, self.ramp_to or self.rate)
        low, high = np.zeros_like(units), np.full_like(units, latest)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            before = self._integral(middle, ramp) < units
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        return low
