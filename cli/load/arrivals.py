"""When requests are due. Pure: a shape of the rate over time, and how irregular the gaps are around it.

Every shape is a unit-rate process of independent gaps whose time is stretched: request k is due at the t at which the
integral of the rate reaches the k-th arrival of that process (time rescaling of an inhomogeneous Poisson process).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from llmsched.engine.errors import ConfigError, setting

ArrivalProcess = Literal["poisson", "gamma", "constant", "ramp", "daynight"]
Times = NDArray[np.float64]

#: A day in seconds, and how far the rate swings in it, where nobody says.
DAY_PERIOD, DAY_AMPLITUDE = 600.0, 0.8
#: The least rate, in requests per second: one in 31 years. All times of a million requests are then far from infinite.
LEAST_RATE = 1e-9

#: Halvings that find a time to far below a microsecond in any schedule.
_HALVINGS = 64


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A schedule. `rate` is in requests per second, finite: the mean, or with ramp the rate at the start.

    `burstiness` is the shape of the gamma distribution of the gaps: 1 is Poisson, below it the gaps vary more (their
    coefficient of variation is 1 / sqrt(burstiness)), above it less. `ramp_to` is the rate at the end of a ramp.
    daynight goes through rate x (1 - day_amplitude) at the start, rate x (1 + day_amplitude) half a `day_period`
    (seconds) later, and back, as a cosine.

    Raises ConfigError.
    """

    rate: float
    process: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    ramp_to: float | None = None
    day_period: float = DAY_PERIOD
    day_amplitude: float = DAY_AMPLITUDE

    def __post_init__(self) -> None:
        if self.process not in get_args(ArrivalProcess):
            raise ConfigError("arrivals", f"{self.process!r} is not one of {', '.join(get_args(ArrivalProcess))}")
        if not 1e-3 <= self.burstiness <= 1e6:
            raise ConfigError(
                "burstiness", f"{self.burstiness:g} is out of range; allowed is 0.001 to 1000000 (1 is Poisson)"
            )
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
        if self.ramp_to is not None and not LEAST_RATE <= self.ramp_to < math.inf:
            raise ConfigError(
                "ramp_to", f"{self.ramp_to:g} is out of range; allowed is {LEAST_RATE:g} or more requests per second"
            )
        if self.process != "daynight" and (self.day_period, self.day_amplitude) != (DAY_PERIOD, DAY_AMPLITUDE):
            raise ConfigError(
                "arrivals",
                f"{setting('day_period')} and {setting('day_amplitude')} shape daynight, not {self.process}: "
                "leave them out, or change it",
            )
        if not 1e-3 <= self.day_period < math.inf:
            raise ConfigError("day_period", f"{self.day_period:g} s is out of range; allowed is 0.001 s or more")
        if not 0 <= self.day_amplitude <= 1:
            raise ConfigError("day_amplitude", f"{self.day_amplitude:g} is out of range; allowed is 0 to 1")

    @property
    def mean_rate(self) -> float:
        """Requests per second, over a whole ramp or day."""
        return self.rate if self.ramp_to is None else (self.rate + self.ramp_to) / 2

    def describe(self) -> str:
        """The schedule in words."""
        burst = "" if self.burstiness == 1 else f" (burstiness {self.burstiness:g})"
        if self.process == "ramp":
            return f"arrivals that ramp from {self.rate:g} to {self.ramp_to:g} requests/s{burst}"
        if self.process == "daynight":
            low, high = (self.rate * (1 + sign * self.day_amplitude) for sign in (-1, 1))
            return f"arrivals between {low:g} and {high:g} requests/s every {self.day_period:g} s{burst}"
        return f"{self.process} arrivals at {self.rate:g} requests/s{burst}"

    def expected(self, duration: float) -> float:
        """Requests expected in `duration` seconds, which a ramp takes: the integral of the rate."""
        return float(self._integral(np.array([duration]), duration)[0])

    def offsets(self, generator: np.random.Generator, count: int | None, duration: float | None) -> Times:
        """Seconds after the start of each request, ascending, the first at 0.

        There are `count` of them, or as many as fall before `duration` seconds, or where both are set the fewer.
        A ramp spans `duration` if it is set, else `count` requests. ValueError if neither is set.
        """
        if duration is None:
            if count is None:
                raise ValueError("a schedule needs an end")
            return self._stretch(self._unit_times(generator, count), self._ramp_span(count, None))
        span = self._ramp_span(count, duration)
        units = self._units_before(generator, self.expected(duration), count)
        due = self._stretch(units, span)
        return due[due < duration][:count]

    def _unit_times(self, generator: np.random.Generator, count: int) -> Times:
        """Arrivals at rate 1, the first at 0."""
        if self.process == "constant":
            return np.arange(count, dtype=np.float64)
        gaps = max(0, count - 1)
        if self.burstiness == 1:
            drawn = generator.exponential(1.0, gaps)
        else:
            drawn = generator.gamma(self.burstiness, 1 / self.burstiness, gaps)
        return np.concatenate([np.zeros(min(count, 1)), np.cumsum(drawn)])

    def _units_before(self, generator: np.random.Generator, end: float, most: int | None) -> Times:
        """The arrivals at rate 1 up to the first at `end` or later, or `most` of them."""
        state, count = generator.bit_generator.state, min(end + 16, math.inf if most is None else most)
        while True:
            generator.bit_generator.state = state
            times = self._unit_times(generator, int(count))
            if times[-1] >= end or count == most:
                return times
            count = min(2 * count, math.inf if most is None else most)

    def _ramp_span(self, count: int | None, duration: float | None) -> float:
        """How long a ramp takes, in seconds; of no meaning to the others."""
        if duration is not None:
            return duration
        assert count is not None
        return 2 * max(1, count - 1) / (self.rate + (self.ramp_to or self.rate))

    def _integral(self, times: Times, span: float) -> Times:
        if self.process == "ramp":
            assert self.ramp_to is not None
            inside = np.minimum(times, span)
            risen = self.rate * inside + (self.ramp_to - self.rate) * inside**2 / (2 * span)
            return risen + self.ramp_to * (times - inside)
        if self.process == "daynight":
            turn = 2 * math.pi / self.day_period
            return self.rate * (times - self.day_amplitude * np.sin(turn * times) / turn)
        return self.rate * times

    def _stretch(self, units: Times, span: float) -> Times:
        """The times at which the integral of the rate reaches `units`."""
        if self.process not in ("ramp", "daynight"):
            return units / self.rate
        low, high = np.zeros_like(units), np.full_like(units, self._latest(units, span))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            before = self._integral(middle, span) < units
            low, high = np.where(before, middle, low), np.where(before, high, middle)
        return low

    def _latest(self, units: Times, span: float) -> float:
        """A time by which the integral has surely reached all of `units`."""
        most = float(units[-1]) if len(units) else 0.0
        if self.process == "daynight":
            return most / self.rate + self.day_period
        return span + most / min(self.rate, self.ramp_to or self.rate)
