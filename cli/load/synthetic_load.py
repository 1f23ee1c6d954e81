from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from numpy.typing import NDArray

from llmsched.cli.load.arrivals import Times
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import OWN, PREFIX, Part, Prompt, RandomPrompt, TextEncoder, Vocabulary
from llmsched.cli.load.random_lengths import RandomLengths, draw_lengths
from llmsched.cli.load.schedule import INPUTS, MOST_REQUESTS, OUTPUTS
from llmsched.cli.quantities import MOST_TOKENS
from llmsched.engine.errors import ConfigError, check_range, setting


@dataclass(frozen=True, kw_only=True)
class SyntheticLoad(Load):
    """Load of random prompts. Raises ConfigError if a setting is invalid or has no effect."""

    num_prompts: int | None = 100  # None: `duration` limits the load
    input_len: int | RandomLengths = 128  # tokens
    output_len: int | RandomLengths = 64  # tokens
    prefix_len: int = 0  # tokens at the start that all prompts share

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("num_prompts", MOST_REQUESTS), ("input_len", MOST_TOKENS), ("output_len", MOST_TOKENS)):
            if isinstance(value := getattr(self, name), int):
                check_range(name, value, 1 <= value <= most, f"1 to {most}")
        longest = self.input_len if isinstance(self.input_len, int) else self.input_len.high
        valid = 0 <= self.prefix_len <= (longest or self.prefix_len)
        check_range("prefix_len", self.prefix_len, valid, f"0 to {setting('input_len')} ({self.input_len})")
        if self.num_prompts is not None:
            return
        if self.duration is None:
            raise ConfigError("num_prompts", f"may be left out only with {setting('duration')}, which ends the load")
        if self.process is not None and self.process.expected(self.duration) > MOST_REQUESTS:
            raise ConfigError(
                "request_rate",
                f"{self.request_rate} for {self.duration:g} s makes too many requests; allowed are {MOST_REQUESTS}",
            )

    @property
    def longest_input(self) -> int:
        return int(self._lengths(self.input_len, INPUTS).max(initial=1))

    @cached_property
    def _offsets(self) -> Times:
        return self.due(self.num_prompts)

    def _lengths(self, lengths: int | RandomLengths, stream: int) -> NDArray[Any]:
        return draw_lengths(lengths, self.random(stream), self.num_requests)

    def _prompts(self, vocabulary: Vocabulary, encode: TextEncoder | None) -> Iterable[Prompt]:
        for index, length in enumerate(self._lengths(self.input_len, INPUTS).tolist()):
            shared = min(self.prefix_len, length)
            parts = (Part(PREFIX, 0, shared), Part(OWN, index, length - shared))
            yield RandomPrompt(self.token_seed, tuple(part for part in parts if part.length), vocabulary)

    def _answers(self, encode: TextEncoder | None) -> Iterable[int]:
        return map(int, self._lengths(self.output_len, OUTPUTS))

    def describe_requests(self) -> str:
        count = f"up to {self.num_requests:,}" if self.stop_after else f"{self.num_requests:,}"
        return f"{count} requests, {self.input_len} tokens in, {self.output_len} out"

    def _facts(self) -> dict[str, Any]:
        return {"num_prompts": None if self.stop_after and self.num_prompts is None else self.num_requests}

    def at_rate(self, rate: float) -> Self:
        if self.arrivals == "ramp":
            raise ConfigError("arrivals", "ramp has no single rate that could be changed; choose another shape")
        return replace(self, request_rate=rate)

    def head(self, count: int, *, seed: int, output_len: int | None = None) -> SyntheticLoad:
        return SyntheticLoad(
            num_prompts=count,
            input_len=self.input_len,
            output_len=output_len or self.output_len,
            seed=seed,
            prompt_seed=self.prompt_seed,
            prefix_len=self.prefix_len,
        )
