"""What every load has: seed, schedule or slots, and an end."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from llmsched.cli.load.arrivals import DAY_AMPLITUDE, DAY_PERIOD, LEAST_RATE, ArrivalProcess, Arrivals, Times
from llmsched.engine.errors import ConfigError, LlmschedError, setting

#: The most requests of a synthetic load, and of a closed loop that only a duration ends.
MOST_REQUESTS = 1_000_000
_MOST_CLOSED = 100_000

#: Independent streams of random numbers drawn from one seed.
ARRIVALS, INPUTS, OUTPUTS = range(1, 4)

#: What shapes a schedule, and of no use without one.
_SHAPES = ("arrivals", "burstiness", "ramp_to", "day_period", "day_amplitude")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When requests are sent. `request_rate` is in requests per second (inf: all at once).

    Without a rate but with `max_concurrency` the loop is closed: a request is scheduled when a slot is free. With both,
    requests keep their place in the schedule and the wait for a slot counts as latency. With neither, all are sent at
    once. What `arrivals` and the settings after it mean, `Arrivals` says. `duration` (seconds) ends the sending.

    Raises LlmschedError naming the setting and its range.
    """

    seed: int = 0
    request_rate: float | None = None
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    ramp_to: float | None = None
    day_period: float = DAY_PERIOD
    day_amplitude: float = DAY_AMPLITUDE
    max_concurrency: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError("seed", f"{self.seed} is out of range; allowed is 0 or more")
        if self.max_concurrency is not None and not 1 <= self.max_concurrency <= MOST_REQUESTS:
            raise ConfigError(
                "max_concurrency", f"{self.max_concurrency} is out of range; allowed is 1 to {MOST_REQUESTS}"
            )
        if self.request_rate is not None and not self.request_rate >= LEAST_RATE:
            raise ConfigError(
                "request_rate",
                f"{self.request_rate} is out of range; allowed is {LEAST_RATE:g} or more requests per second, or inf",
            )
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise ConfigError("duration", f"{self.duration:g} s is out of range; allowed is above 0")
        if self.at_once and self.duration is not None:  # at_once looks at the shape, and so checks it
            raise ConfigError(
                "duration",
                "has no effect when all requests are sent at once; give "
                f"{setting('request_rate')} or {setting('max_concurrency')}",
            )

    def check_shape(self) -> None:
        """Raise LlmschedError for the shape of a schedule where there is no rate, nor will be one by `at_rate`."""
        if self.process is None and self.shaped:
            raise LlmschedError(
                f"{', '.join(map(setting, self.shaped))}: the shape of a schedule, which needs a finite "
                f"{setting('request_rate')}"
            )

    @property
    def replayed(self) -> bool:
        """Whether requests come at times that were recorded, not drawn."""
        return False

    @cached_property
    def process(self) -> Arrivals | None:
        """The random schedule; None: recorded times, all at once, or by free slots."""
        if self.replayed or self.request_rate is None or math.isinf(self.request_rate):
            return None
        return Arrivals(
            self.request_rate, self.arrivals, self.burstiness, self.ramp_to, self.day_period, self.day_amplitude
        )

    @property
    def shaped(self) -> list[str]:
        """The settings that shape a schedule and are not at their defaults; burstiness alone makes arrivals gamma."""
        defaults = {f.name: f.default for f in fields(Schedule)}
        changed = [name for name in _SHAPES if getattr(self, name) != defaults[name]]
        if "burstiness" in changed and self.arrivals == "gamma":
            changed.remove("arrivals")
        return changed

    @property
    def closed(self) -> bool:
        return not self.replayed and self.request_rate is None and self.max_concurrency is not None

    @property
    def at_once(self) -> bool:
        """Whether nothing but free slots keeps requests back."""
        return not self.replayed and not self.closed and self.process is None

    @property
    def stop_after(self) -> float | None:
        return self.duration if self.closed else None

    @property
    def asked_rate(self) -> float | None:
        return None if self.process is None else self.process.mean_rate

    def random(self, stream: int) -> np.random.Generator:
        """The random numbers of one stream of the seed."""
        return np.random.default_rng([self.seed, stream])

    def due(self, count: int | None) -> Times:
        """Offsets in seconds of at most `count` requests; None: as many as `duration` holds."""
        if self.process is not None:
            return self.process.offsets(self.random(ARRIVALS), count, self.duration)
        return np.zeros(_MOST_CLOSED if count is None else count)

    def describe(self) -> str:
        during = f" for {self.duration:g} s" if self.duration is not None else ""
        if self.closed:
            return f"closed loop, {self.max_concurrency} at a time{during}"
        cap = f", at most {self.max_concurrency} at a time" if self.max_concurrency else ""
        return f"{self._describe_arrivals()}{during}{cap}"

    def settings(self) -> dict[str, Any]:
        """The fields for JSON, with the load in words; what shapes a schedule is null where it has no effect."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.repr}  # a trace has no place here
        idle = set(_SHAPES) if self.process is None else set()
        if self.arrivals != "daynight":
            idle |= {"day_period", "day_amplitude"}
        return {"load": self.describe(), **values, **dict.fromkeys(idle)}

    def _describe_arrivals(self) -> str:
        return "all at once" if self.process is None else self.process.describe()


def _plain(value: Any) -> Any:
    """A setting for JSON, which has no infinity: the rate "all at once" becomes null, as `load` says it in words."""
    if value == math.inf:
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def fingerprint(settings: Mapping[str, Any]) -> str:
    """The SHA-256 of settings in their canonical JSON: equal if and only if all of them are."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
