from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from llmsched.cli.load.arrivals import DAY_AMPLITUDE, DAY_PERIOD, LEAST_RATE, ArrivalProcess, Arrivals, Times
from llmsched.engine.errors import ConfigError, LlmschedError, check_range, setting

#: Most requests of a synthetic load, and of a closed loop that is limited only by its duration.
MOST_REQUESTS = 1_000_000
_MOST_CLOSED = 100_000

#: Independent streams of random numbers from one seed.
ARRIVALS, INPUTS, OUTPUTS = range(1, 4)

#: Settings that shape a random schedule and have no effect without one.
SHAPES = ("arrivals", "burstiness", "ramp_to", "day_period", "day_amplitude")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Settings for the times at which requests are sent. Raises ConfigError for an invalid setting.

    Without `request_rate`, all requests are sent at once or, with `max_concurrency`, in a closed loop: each request is
    sent when an earlier one ends. `Arrivals` describes the settings of random arrivals.
    """

    seed: int = 0  # of lengths, times and, with `prompt_seed`, the tokens of random prompts
    prompt_seed: int = 0
    request_rate: float | None = None  # requests per second; inf: all at once
    arrivals: ArrivalProcess = "poisson"
    burstiness: float = 1.0
    ramp_to: float | None = None
    day_period: float = DAY_PERIOD
    day_amplitude: float = DAY_AMPLITUDE
    max_concurrency: int | None = None  # requests in flight; a wait for one of them to end counts as latency
    duration: float | None = None  # seconds

    def __post_init__(self) -> None:
        check_range("seed", self.seed, self.seed >= 0, "0 or more")
        check_range("prompt_seed", self.prompt_seed, 0 <= self.prompt_seed < 1 << 32, f"0 to {(1 << 32) - 1}")
        if (most := self.max_concurrency) is not None:
            check_range("max_concurrency", most, 1 <= most <= MOST_REQUESTS, f"1 to {MOST_REQUESTS}")
        if (rate := self.request_rate) is not None:
            check_range("request_rate", rate, rate >= LEAST_RATE, f"{LEAST_RATE:g} or more requests per second, or inf")
        if self.duration is not None:
            check_range("duration", self.duration, 0 < self.duration < math.inf, "above 0 s")
        if self.at_once and self.duration is not None:  # at_once builds the process, which checks its shape
            raise ConfigError(
                "duration",
                "has no effect when all requests are sent at once; give "
                f"{setting('request_rate')} or {setting('max_concurrency')}",
            )

    def check_shape(self) -> None:
        """Raise LlmschedError if the load has settings of random arrivals, such as `burstiness`, but no rate."""
        if self.process is None and self.shaped:
            raise LlmschedError(
                f"{', '.join(map(setting, self.shaped))}: only has an effect with a finite {setting('request_rate')}"
            )

    @property
    def replayed(self) -> bool:
        """True if requests are sent at the times that a trace recorded."""
        return False

    @cached_property
    def process(self) -> Arrivals | None:
        if self.replayed or self.request_rate is None or math.isinf(self.request_rate):
            return None
        return Arrivals(
            self.request_rate, self.arrivals, self.burstiness, self.ramp_to, self.day_period, self.day_amplitude
        )

    @property
    def shaped(self) -> list[str]:
        """Names of the settings that shape random arrivals and differ from their defaults."""
        defaults = {f.name: f.default for f in fields(Schedule)}
        changed = [name for name in SHAPES if getattr(self, name) != defaults[name]]
        if "burstiness" in changed and self.arrivals == "gamma":
            changed.remove("arrivals")
        return changed

    @property
    def closed(self) -> bool:
        """True if each request is sent when an earlier one ends."""
        return not self.replayed and self.request_rate is None and self.max_concurrency is not None

    @property
    def at_once(self) -> bool:
        return not self.replayed and not self.closed and self.process is None

    @property
    def stop_after(self) -> float | None:
        """Seconds after which a closed loop stops sending."""
        return self.duration if self.closed else None

    @property
    def asked_rate(self) -> float | None:
        """Mean requests per second, if the schedule has a rate."""
        return None if self.process is None else self.process.mean_rate

    @property
    def token_seed(self) -> int:
        return self.seed + (self.prompt_seed << 32)

    @property
    def cache_salt(self) -> str | None:
        """Salt that keeps a server from reusing cached prompts of other runs, or None if `prompt_seed` is 0."""
        return f"llmsched-{self.token_seed:x}" if self.prompt_seed else None

    def random(self, stream: int) -> np.random.Generator:
        """Return a new random generator that depends on the seed and `stream` (ARRIVALS, INPUTS or OUTPUTS)."""
        return np.random.default_rng([self.seed, stream])

    def due(self, count: int | None) -> Times:
        """Return the due times of at most `count` requests (None: no such limit), in seconds after the start."""
        if self.process is not None:
            return self.process.offsets(self.random(ARRIVALS), count, self.duration)
        return np.zeros(_MOST_CLOSED if count is None else count)

    def describe(self) -> str:
        during = f" for {self.duration:g} s" if self.duration is not None else ""
        if self.closed:
            return f"closed loop, {self.max_concurrency} at a time{during}"
        cap = f", at most {self.max_concurrency} at a time" if self.max_concurrency else ""
        return f"{self._describe_arrivals()}{during}{cap}"

    def _describe_arrivals(self) -> str:
        return "all at once" if self.process is None else self.process.describe()
