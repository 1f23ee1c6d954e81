from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Self

import numpy as np

from llmsched.cli.load.arrivals import Times
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import (
    BLOCK,
    OWN,
    EncodedPrompt,
    Part,
    Prompt,
    RandomPrompt,
    TextEncoder,
    TextPrompt,
    Vocabulary,
)
from llmsched.cli.load.random_lengths import RandomLengths, draw_lengths
from llmsched.cli.load.schedule import OUTPUTS
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.load.traces.trace import Trace, TraceRequest, digest
from llmsched.engine.errors import ConfigError, LlmschedError, check_range, setting

#: Lowest speedup. It keeps the times finite.
_SLOWEST = 1e-9


@dataclass(frozen=True, kw_only=True)
class TraceLoad(Load):
    """Load of the requests of a trace.

    The trace is replayed at its own times, `speedup` times as fast. A finite `request_rate` rescales the times to this
    mean rate. The settings of `Schedule` determine when requests are sent if the trace has no times, if
    `ignore_timestamps` is set, or if the rate is inf. A length of 0 becomes 1, because a request needs a token.
    """

    trace: Trace = field(repr=False)
    speedup: float = 1.0
    ignore_timestamps: bool = False
    output_len: int | RandomLengths | None = None  # tokens, for requests whose answer is not in the trace
    max_input_len: int | None = None  # tokens to which longer prompts are cut
    max_output_len: int | None = None  # tokens to which longer answers are cut

    def __post_init__(self) -> None:
        check_range("speedup", self.speedup, _SLOWEST <= self.speedup < math.inf, f"{_SLOWEST:g} or more")
        for name in ("max_input_len", "max_output_len"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, value >= 1, "1 or more tokens")
        if self.replayed:
            if self.request_rate is not None and self.speedup != 1:
                raise ConfigError(
                    "speedup", f"sets the pace of the trace, as {setting('request_rate')} does; give one of them"
                )
            if self.request_rate is not None and not self.trace.rate:
                raise ConfigError(
                    "request_rate", f"cannot rescale {self.trace.name}: all its requests have the same time"
                )
            if self.shaped:
                raise LlmschedError(
                    f"{', '.join(map(setting, self.shaped))}: {self.trace.name} has recorded times; give "
                    f"{setting('ignore_timestamps')} to draw other times"
                )
        elif self.speedup != 1:
            raise ConfigError("speedup", f"{self.speedup:g} has no effect: no timestamps of the trace are used")
        elif self.request_rate is None and self.max_concurrency is None:
            why = f" ({', '.join(self.trace.notes)})" if self.trace.notes else ""
            raise LlmschedError(
                f"no timestamps of {self.trace.name} are used{why}; set the times with {setting('request_rate')} "
                f"(inf: all at once) or {setting('max_concurrency')}"
            )
        super().__post_init__()

    @property
    def replayed(self) -> bool:
        return self.trace.timed and not self.ignore_timestamps and self.request_rate != math.inf

    @property
    def asked_rate(self) -> float | None:
        return self.trace.rate * self._pace if self.replayed and self.trace.rate else super().asked_rate

    @property
    def _pace(self) -> float:
        return self.speedup if self.request_rate is None else self.request_rate / (self.trace.rate or math.nan)

    @property
    def longest_input(self) -> int:
        return max((_sendable(request.words_in, self.max_input_len) for request in self._requests), default=1)

    @property
    def _requests(self) -> tuple[TraceRequest, ...]:
        return self.trace.requests[: self.num_requests]

    @cached_property
    def _offsets(self) -> Times:
        if not self.replayed:
            return self.due(len(self.trace.requests))
        times = np.array([request.offset for request in self.trace.requests]) / self._pace
        return times if self.duration is None else times[times < self.duration]

    def _prompts(self, vocabulary: Vocabulary, encode: TextEncoder | None) -> Iterable[Prompt]:
        for index, request in enumerate(self._requests):
            if request.content is None:
                yield RandomPrompt(self.token_seed, tuple(self._parts(index, request)), vocabulary)
            elif encode is not None and not vocabulary.of_words:
                yield EncodedPrompt(encode.prompt(request.content)[: self.max_input_len])
            elif self.max_input_len is not None:
                raise ConfigError("max_input_len", "prompts that are sent as text cannot be cut at a token")
            else:
                yield TextPrompt(request.content)

    def _parts(self, index: int, request: TraceRequest) -> Iterator[Part]:
        left = _sendable(request.input_len or 0, self.max_input_len)
        if not request.hash_ids:
            yield Part(OWN, index, left)
        for block in request.hash_ids:
            if left > 0:
                yield Part(BLOCK, block, min(self.trace.block_tokens, left))
            left -= self.trace.block_tokens

    def _answers(self, encode: TextEncoder | None) -> list[int]:
        drawn = draw_lengths(self.output_len or 0, self.random(OUTPUTS), self.num_requests).tolist()
        answers = []
        for request, length in zip(self._requests, drawn, strict=True):
            stated = request.answer_len() if encode is None else request.answer_len(encode.count)
            if stated is None and self.output_len is None:
                raise LlmschedError(
                    f"{self.trace.name}, line {request.line}: neither an answer nor its length (max_tokens, "
                    f"output_tokens); give {setting('output_len')} for such requests"
                )
            answers.append(_sendable(length if stated is None else stated, self.max_output_len))
        return answers

    def _describe_arrivals(self) -> str:
        if not self.replayed:
            return super()._describe_arrivals()
        pace = f", {self.speedup:g} times as fast" if self.speedup != 1 else ""
        if self.request_rate is not None:
            pace = f", scaled to {self.request_rate:g} requests/s"
        return f"over {self._offsets[-1]:,.4g} s at the trace's own times{pace}"

    def describe_requests(self) -> str:
        facts = self._length_facts()
        unit = "words" if self.trace.of_text else "tokens"
        out = facts["mean_output_len"]
        mean = f"mean {facts['mean_input_len']:,.0f} {unit} in" + ("" if out is None else f", {out:,.0f} out")
        changed = {"zero_lengths": "of length 0 sent as 1", "cut_lengths": "cut"}
        told = [f"{facts[name]:,} {text}" for name, text in changed.items() if facts[name]]
        return f"{self.num_requests:,} requests of {self.trace.name} ({', '.join([mean, *told, *self.trace.notes])})"

    def _length_facts(self) -> dict[str, Any]:
        inputs = [request.words_in for request in self._requests]
        outputs = [length for request in self._requests if (length := request.answer_len()) is not None]
        over = zip((inputs, outputs), (self.max_input_len, self.max_output_len), strict=True)
        return {
            "mean_input_len": sum(inputs) / max(1, len(inputs)),
            "mean_output_len": sum(outputs) / len(outputs) if outputs else None,
            "zero_lengths": sum(length == 0 for length in (*inputs, *outputs)),
            "cut_lengths": sum(length > most for lengths, most in over if most is not None for length in lengths),
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "trace": self.trace.name,
            "trace_format": self.trace.format,
            "trace_notes": list(self.trace.notes),
            "num_prompts": self.num_requests,
            **self._length_facts(),
            "trace_sha256": self._digest,
            **({"arrivals": "trace"} if self.replayed else {}),
        }

    @cached_property
    def _digest(self) -> str:
        return digest(self._requests)

    def at_rate(self, rate: float) -> Self:
        return replace(self, request_rate=rate, speedup=1.0)

    def head(self, count: int, *, seed: int, output_len: int | None = None) -> SyntheticLoad:
        inputs = [_sendable(request.words_in, self.max_input_len) for request in self._requests]
        return SyntheticLoad(
            num_prompts=count,
            input_len=int(median(inputs)),
            output_len=output_len or int(median(self._answers(None))),
            seed=seed,
            prompt_seed=self.prompt_seed,
        )


def _sendable(length: int, most: int | None) -> int:
    return max(1, length if most is None else min(length, most))
