"""Synthetic load: random prompts of given lengths, sent by a schedule or by free slots."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from llmsched.cli.bench.arrivals import ArrivalProcess, Arrivals, Times
from llmsched.cli.bench.lengths import Lengths, fixed
from llmsched.cli.bench.load import PlannedRequest
from llmsched.cli.bench.prompts import OWN, PREFIX, Part, RandomPrompt, Vocabulary
from llmsched.engine.errors import LlmschedError

#: Requests of a closed loop that only a duration ends.
MOST_REQUESTS = 100_000

#: Independent streams of random numbers drawn from one seed.
_ARRIVALS, _INPUTS, _OUTPUTS = range(1, 4)


@dataclass(frozen=True)
class Workload:
    """What to send. Lengths are in tokens, `request_rate` in requests per second (inf: all at once).

    Without a rate but with `max_concurrency` the loop is closed: a request is scheduled when a slot is free. With both,
    requests keep their place in the schedule and the wait for a slot counts as latency. With neither, all are sent at
    once. What `arrivals` and the settings after it mean, `Arrivals` says. `duration` (seconds) ends the schedule;
    `num_prompts` may then be None: as many as it holds. The first `prefix_len` tokens are the same in every prompt.

    Raises LlmschedError naming the setting and its range.
    """

    num_prompts: int | None = 100
    input_len: int | Lengths = 128
    output_len: int | Lengths = 64
    seed: int = 0
    request_rate: float | None = None
    arrivals: ArrivalProcess = "poisson"
    max_concurrency: int | None = None
    prefix_len: int = 0
    burstiness: float = 1.0
    ramp_to: float | None = None
    day_period: float = 600.0
    day_amplitude: float = 0.8
    duration: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "max_concurrency"):
            if isinstance(value := getattr(self, name), int) and value < 1:
                raise LlmschedError(f"{name} is {value}; allowed is 1 or more")
        if self.seed < 0:
            raise LlmschedError(f"seed is {self.seed}; allowed is 0 or more")
        if self.request_rate is not None and not self.request_rate > 0:
            raise LlmschedError(f"request_rate is {self.request_rate}; allowed is above 0 requests per second, or inf")
        longest = self.input_len if isinstance(self.input_len, int) else self.input_len.high
        if not 0 <= self.prefix_len <= (longest or self.prefix_len):
            raise LlmschedError(f"prefix_len is {self.prefix_len}; allowed is 0 to input_len ({self.input_len})")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.duration is not None and not self.duration > 0:
            raise LlmschedError(f"duration is {self.duration:g} s; allowed is above 0")
        if self.num_prompts is None and self.duration is None:
            raise LlmschedError("num_prompts is left out; allowed only where duration ends the load")
        if self.schedule is None and self.duration is not None and not self.closed:
            raise LlmschedError("duration ends nothing where all is sent at once; give request_rate or max_concurrency")
        if self.schedule is None:
            shaped = [name for name in _SHAPES if getattr(self, name) != _DEFAULTS[name]]
            if shaped:
                raise LlmschedError(f"{', '.join(shaped)}: the shape of a schedule, which needs a finite request_rate")

    @cached_property
    def schedule(self) -> Arrivals | None:
        """When requests are due; None: all at once, or by free slots."""
        if self.request_rate is None or math.isinf(self.request_rate):
            return None
        return Arrivals(
            self.request_rate, self.arrivals, self.burstiness, self.ramp_to, self.day_period, self.day_amplitude
        )

    @property
    def closed(self) -> bool:
        return self.request_rate is None and self.max_concurrency is not None

    @property
    def stop_after(self) -> float | None:
        return self.duration if self.closed else None

    @property
    def num_requests(self) -> int:
        return len(self._offsets)

    @property
    def longest_input(self) -> int:
        if isinstance(self.input_len, int):
            return self.input_len
        return int(self._lengths(self.input_len, _INPUTS).max(initial=1))

    @cached_property
    def _offsets(self) -> Times:
        if self.schedule is not None:
            return self.schedule.offsets(self._generator(_ARRIVALS), self.num_prompts, self.duration)
        return np.zeros(MOST_REQUESTS if self.num_prompts is None else self.num_prompts)

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])

    def _lengths(self, lengths: int | Lengths, stream: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        known = fixed(lengths) if isinstance(lengths, int) else lengths
        return known.draw(self._generator(stream), self.num_requests)

    def plan(self, ids: Sequence[int] | None) -> list[PlannedRequest]:
        vocabulary = Vocabulary(ids)
        inputs, outputs = self._lengths(self.input_len, _INPUTS), self._lengths(self.output_len, _OUTPUTS)
        return [
            PlannedRequest(index, offset, RandomPrompt(self.seed, self._parts(index, length), vocabulary), answer)
            for index, (offset, length, answer) in enumerate(
                zip(self._offsets.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
            )
        ]

    def _parts(self, index: int, length: int) -> tuple[Part, ...]:
        shared = min(self.prefix_len, length)
        parts = (Part(PREFIX, 0, shared), Part(OWN, index, length - shared))
        return tuple(part for part in parts if part.length)

    def describe(self) -> str:
        during = f" for {self.duration:g} s" if self.duration is not None else ""
        if self.closed:
            return f"closed loop, {self.max_concurrency} at a time{during}"
        cap = f", at most {self.max_concurrency} at a time" if self.max_concurrency else ""
        return f"{self.schedule.describe() if self.schedule else 'all at once'}{during}{cap}"

    def describe_requests(self) -> str:
        count = f"up to {self.num_requests:,}" if self.stop_after else f"{self.num_requests:,}"
        return f"{count} requests, {self.input_len} tokens in, {self.output_len} out"

    def parameters(self) -> dict[str, Any]:
        settings = {name: _plain(getattr(self, name)) for name in _DEFAULTS}
        settings["num_prompts"] = None if self.stop_after and self.num_prompts is None else self.num_requests
        settings = {"load": self.describe(), **settings}
        return {**settings, "fingerprint": fingerprint(settings)}

    def with_seed(self, seed: int) -> Workload:
        return replace(self, seed=seed)

    def at_rate(self, rate: float) -> Workload:
        if self.arrivals == "ramp":
            raise LlmschedError(
                "arrivals is ramp, which has no single rate that could be another; choose another shape"
            )
        return replace(self, request_rate=rate)

    def one_by_one(self, count: int, *, seed: int) -> Workload:
        return replace(self.head(count, seed=seed), max_concurrency=1)

    def head(self, count: int, *, seed: int, output_len: int | None = None) -> Workload:
        return Workload(count, self.input_len, output_len or self.output_len, seed, prefix_len=self.prefix_len)


#: What shapes a schedule, and of no use without one.
_SHAPES = ("arrivals", "burstiness", "ramp_to", "day_period", "day_amplitude")
_DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(Workload)}


def _plain(value: Any) -> Any:
    """A setting for JSON, which has no infinity: the rate "all at once" becomes null, as `load` says it in words."""
    if isinstance(value, Lengths):
        return str(value)
    return None if value == math.inf else value


def fingerprint(settings: Mapping[str, Any]) -> str:
    """The SHA-256 of settings in their canonical JSON: equal if and only if all of them are."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
