"""Load from a trace: its lengths, its shared prefixes or its texts, and its times or a schedule of one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from llmsched.cli.load.arrivals import Times
from llmsched.cli.load.lengths import Lengths, fixed
from llmsched.cli.load.load import PlannedRequest
from llmsched.cli.load.prompts import (
    BLOCK,
    OWN,
    Encode,
    EncodedPrompt,
    Part,
    Prompt,
    RandomPrompt,
    TextPrompt,
    Vocabulary,
)
from llmsched.cli.load.schedule import OUTPUTS, Schedule, fingerprint
from llmsched.cli.load.synthetic import Workload
from llmsched.cli.load.traces.trace import Trace, TraceRequest, digest
from llmsched.engine.errors import ConfigError, LlmschedError, setting

#: The least speedup: recorded times stay far from infinite.
_SLOWEST = 1e-9


@dataclass(frozen=True, kw_only=True)
class TraceLoad(Schedule):
    """The requests of a trace.

    A timed trace is replayed at its own times, `speedup` times as fast; a finite `request_rate` scales its times so
    that their mean rate becomes that, and keeps their pattern. With `ignore_timestamps`, and without timestamps, the
    schedule is that of `Schedule`, and must be said: a rate (inf: all at once) or slots.

    `duration` keeps what is due before it. `max_input_len` and `max_output_len` cut what is longer; by default nothing
    is cut, and what the target cannot take fails there. `output_len` is for requests whose answer's length the trace
    does not state. A request cannot have no tokens: lengths of 0 become 1.
    """

    trace: Trace = field(repr=False)
    speedup: float = 1.0
    ignore_timestamps: bool = False
    output_len: int | Lengths | None = None
    max_input_len: int | None = None
    max_output_len: int | None = None

    def __post_init__(self) -> None:
        if not _SLOWEST <= self.speedup < math.inf:
            raise ConfigError("speedup", f"{self.speedup:g} is out of range; allowed is {_SLOWEST:g} or more")
        for name in ("max_input_len", "max_output_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(name, f"{value} is out of range; allowed is 1 or more tokens")
        if self.replayed:
            self._check_replay()
        elif self.speedup != 1:
            raise ConfigError("speedup", f"{self.speedup:g} has no effect: no timestamps of the trace are used")
        elif self.request_rate is None and self.max_concurrency is None:
            raise LlmschedError(
                f"{self.trace.name} has no timestamps to go by; say when to send with {setting('request_rate')} "
                f"(inf: all at once) or {setting('max_concurrency')}"
            )
        super().__post_init__()

    def _check_replay(self) -> None:
        if self.request_rate is not None:
            if self.speedup != 1:
                raise ConfigError(
                    "speedup", f"says how fast the trace runs, as {setting('request_rate')} does; give one of them"
                )
            if not self.trace.rate:
                raise ConfigError("request_rate", f"cannot scale {self.trace.name}: all of it comes at one time")
        if self.shaped:
            raise LlmschedError(
                f"{', '.join(map(setting, self.shaped))}: {self.trace.name} has its own times; to draw others, give "
                f"{setting('ignore_timestamps')}"
            )

    @property
    def replayed(self) -> bool:
        return self.trace.timed and not self.ignore_timestamps and self.request_rate != math.inf

    @property
    def asked_rate(self) -> float | None:
        return self.trace.rate * self._pace if self.replayed and self.trace.rate else super().asked_rate

    @property
    def num_requests(self) -> int:
        return len(self._offsets)

    @property
    def longest_input(self) -> int:
        return max((self._held(request.words_in, self.max_input_len) for request in self._requests), default=1)

    @cached_property
    def _offsets(self) -> Times:
        if not self.replayed:
            return self.due(len(self.trace.requests))
        times = np.array([request.offset for request in self.trace.requests]) / self._pace
        return times if self.duration is None else times[times < self.duration]

    @property
    def _pace(self) -> float:
        """How many times as fast as recorded a trace is replayed."""
        return self.speedup if self.request_rate is None else self.request_rate / (self.trace.rate or math.nan)

    @property
    def _requests(self) -> tuple[TraceRequest, ...]:
        return self.trace.requests[: self.num_requests]

    @staticmethod
    def _held(length: int, most: int | None) -> int:
        """A length that can be sent."""
        return max(1, length if most is None else min(length, most))

    def plan(self, ids: Sequence[int] | None, encode: Encode | None = None) -> list[PlannedRequest]:
        vocabulary = Vocabulary(ids)
        answers = self._answers(encode)
        return [
            PlannedRequest(index, offset, self._prompt(index, request, vocabulary, encode), answer)
            for index, (offset, request, answer) in enumerate(
                zip(self._offsets.tolist(), self._requests, answers, strict=True)
            )
        ]

    def _prompt(self, index: int, request: TraceRequest, vocabulary: Vocabulary, encode: Encode | None) -> Prompt:
        if request.content is None:
            return RandomPrompt(self.seed, tuple(self._parts(index, request)), vocabulary)
        if encode is not None and not vocabulary.of_words:
            return EncodedPrompt(encode.prompt(request.content)[: self.max_input_len])
        if self.max_input_len is not None:
            raise ConfigError("max_input_len", "prompts that are sent as text cannot be cut at a token")
        return TextPrompt(request.content)

    def _parts(self, index: int, request: TraceRequest) -> Iterator[Part]:
        """The blocks of a prompt, or random tokens of its own."""
        left = self._held(request.input_len or 0, self.max_input_len)
        if not request.hash_ids:
            yield Part(OWN, index, left)
        for block in request.hash_ids:
            if left > 0:
                yield Part(BLOCK, block, min(self.trace.block_tokens, left))
            left -= self.trace.block_tokens

    def _answers(self, encode: Encode | None) -> list[int]:
        """Tokens of each answer; of a text, without an encoder, its words."""
        missing = fixed(self.output_len) if isinstance(self.output_len, int) else self.output_len
        drawn = [] if missing is None else missing.draw(self.random(OUTPUTS), self.num_requests).tolist()
        answers = []
        for index, request in enumerate(self._requests):
            length = request.words_out
            if request.output_len is None and request.answer is not None and encode is not None:
                length = encode.count(request.answer)
            if length is None:
                if missing is None:
                    raise LlmschedError(
                        f"{self.trace.name}, line {request.line}: no max_tokens; "
                        f"give {setting('output_len')} for requests without it"
                    )
                length = drawn[index]
            answers.append(self._held(length, self.max_output_len))
        return answers

    def _describe_arrivals(self) -> str:
        if not self.replayed:
            return super()._describe_arrivals()
        pace = f", {self.speedup:g} times as fast" if self.speedup != 1 else ""
        if self.request_rate is not None:
            pace = f", scaled to {self.request_rate:g} requests/s"
        return f"over {self._offsets[-1]:,.4g} s at the trace's own times{pace}"

    def describe_requests(self) -> str:
        facts = self._facts()
        unit = "words" if self.trace.of_text else "tokens"
        out = facts["mean_output_len"]
        mean = f"mean {facts['mean_input_len']:,.0f} {unit} in" + ("" if out is None else f", {out:,.0f} out")
        told = [f"{facts[name]:,} {text}" for name, text in _TOLD.items() if facts[name]]
        return f"{self.num_requests:,} requests of {self.trace.name} ({', '.join([mean, *told])})"

    def _facts(self) -> dict[str, Any]:
        """What the requests are like, for reports."""
        inputs = [request.words_in for request in self._requests]
        outputs = [length for request in self._requests if (length := request.words_out) is not None]
        over = zip((inputs, outputs), (self.max_input_len, self.max_output_len), strict=True)
        return {
            "mean_input_len": sum(inputs) / max(1, len(inputs)),
            "mean_output_len": sum(outputs) / len(outputs) if outputs else None,
            "zero_lengths": sum(length == 0 for length in (*inputs, *outputs)),
            "cut_lengths": sum(length > most for lengths, most in over if most is not None for length in lengths),
        }

    def parameters(self) -> dict[str, Any]:
        settings = self.settings() | {"trace": self.trace.name, "trace_format": self.trace.format}
        settings |= {"num_prompts": self.num_requests, **self._facts(), "trace_sha256": self._digest}
        if self.replayed:
            settings["arrivals"] = "trace"
        return {**settings, "fingerprint": fingerprint(settings)}

    @cached_property
    def _digest(self) -> str:
        return digest(self._requests)

    def with_seed(self, seed: int) -> TraceLoad:
        return replace(self, seed=seed)

    def at_rate(self, rate: float) -> TraceLoad:
        return replace(self, request_rate=rate, speedup=1.0)

    def one_by_one(self, count: int, *, seed: int) -> Workload:
        return self.head(count, seed=seed).one_by_one(count, seed=seed)

    def head(self, count: int, *, seed: int, output_len: int | None = None) -> Workload:
        inputs = [self._held(request.words_in, self.max_input_len) for request in self._requests]
        return Workload(
            num_prompts=count,
            input_len=int(median(inputs)),
            output_len=output_len or int(median(self._answers(None))),
            seed=seed,
        )


#: What reports tell of lengths that were not sent as they stand.
_TOLD = {"zero_lengths": "of 0 sent as 1", "cut_lengths": "cut"}
