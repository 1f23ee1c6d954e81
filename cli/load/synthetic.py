"""Synthetic load: random prompts of given lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmsched.cli.load.arrivals import Times
from llmsched.cli.load.lengths import Lengths, fixed
from llmsched.cli.load.load import PlannedRequest
from llmsched.cli.load.prompts import OWN, PREFIX, Encode, Part, RandomPrompt, Vocabulary
from llmsched.cli.load.schedule import INPUTS, MOST_REQUESTS, OUTPUTS, Schedule, fingerprint
from llmsched.cli.options.engine import MOST_TOKENS
from llmsched.engine.errors import ConfigError, setting


@dataclass(frozen=True, kw_only=True)
class Workload(Schedule):
    """What to send. Lengths are in tokens; the first `prefix_len` of them are the same in every prompt.

    `num_prompts` None: as many as `duration` holds.
    """

    num_prompts: int | None = 100
    input_len: int | Lengths = 128
    output_len: int | Lengths = 64
    prefix_len: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("num_prompts", MOST_REQUESTS), ("input_len", MOST_TOKENS), ("output_len", MOST_TOKENS)):
            if isinstance(value := getattr(self, name), int) and not 1 <= value <= most:
                raise ConfigError(name, f"{value} is out of range; allowed is 1 to {most}")
        longest = self.input_len if isinstance(self.input_len, int) else self.input_len.high
        if not 0 <= self.prefix_len <= (longest or self.prefix_len):
            raise ConfigError(
                "prefix_len",
                f"{self.prefix_len} is out of range; allowed is 0 to {setting('input_len')} ({self.input_len})",
            )
        if self.num_prompts is None:
            self._check_end()

    def _check_end(self) -> None:
        if self.duration is None:
            raise ConfigError("num_prompts", f"may be left out only with {setting('duration')}, which ends the load")
        if self.process is not None and self.process.expected(self.duration) > MOST_REQUESTS:
            raise ConfigError(
                "request_rate",
                f"{self.request_rate} for {self.duration:g} s makes too many requests; allowed are {MOST_REQUESTS}",
            )

    @property
    def num_requests(self) -> int:
        return len(self._offsets)

    @property
    def longest_input(self) -> int:
        return int(self._lengths(self.input_len, INPUTS).max(initial=1))

    @cached_property
    def _offsets(self) -> Times:
        return self.due(self.num_prompts)

    def _lengths(self, lengths: int | Lengths, stream: int) -> NDArray[np.int64]:
        known = fixed(lengths) if isinstance(lengths, int) else lengths
        return known.draw(self.random(stream), self.num_requests)

    def plan(self, ids: Sequence[int] | None, encode: Encode | None = None) -> list[PlannedRequest]:
        vocabulary = Vocabulary(ids)
        inputs, outputs = self._lengths(self.input_len, INPUTS), self._lengths(self.output_len, OUTPUTS)
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

    def describe_requests(self) -> str:
        count = f"up to {self.num_requests:,}" if self.stop_after else f"{self.num_requests:,}"
        return f"{count} requests, {self.input_len} tokens in, {self.output_len} out"

    def parameters(self) -> dict[str, Any]:
        settings = self.settings()
        settings["num_prompts"] = None if self.stop_after and self.num_prompts is None else self.num_requests
        return {**settings, "fingerprint": fingerprint(settings)}

    def with_seed(self, seed: int) -> Workload:
        return replace(self, seed=seed)

    def at_rate(self, rate: float) -> Workload:
        if self.arrivals == "ramp":
            raise ConfigError("arrivals", "ramp has no single rate that could be changed; choose another shape")
        return replace(self, request_rate=rate)

    def one_by_one(self, count: int, *, seed: int) -> Workload:
        return replace(self.head(count, seed=seed), max_concurrency=1)

    def head(self, count: int, *, seed: int, output_len: int | None = None) -> Workload:
        return Workload(
            num_prompts=count,
            input_len=self.input_len,
            output_len=output_len or self.output_len,
            seed=seed,
            prefix_len=self.prefix_len,
        )
