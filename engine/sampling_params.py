"""Sampling parameters of a request, and their allowed ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmsched.engine.errors import RequestError

if TYPE_CHECKING:
    from llmsched.engine.grammar.compiler import Grammar

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
SEED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, named as in the OpenAI API or, if OpenAI has no such parameter, as in vLLM.

    Raises RequestError for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0  # 0 chooses the most likely token, whatever top_p, top_k and min_p are
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 turns it off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16  # 0 computes only the prompt
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # k returns log-probabilities of the chosen token and of the k most likely tokens
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    skip_special_tokens: bool = True
    shown_token_ids: frozenset[int] = frozenset()  # special tokens that are kept in the text
    include_stop_str_in_output: bool = False
    grammar: Grammar | None = None  # from Engine.grammars; outputs match it, and end when it ends
    grammar_after: int | None = None  # the grammar begins after the first token with this id

    def __post_init__(self) -> None:
        within("n", self.n, 1, MAX_N)
        within("temperature", self.temperature, 0, 2)
        within("top_p", self.top_p, 0, 1)
        within("top_k", self.top_k, -1, None)
        within("min_p", self.min_p, 0, 1)
        within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        within("presence_penalty", self.presence_penalty, -2, 2)
        within("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            within("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        within("max_tokens", self.max_tokens, 0, None)
        within("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                within(name, count, 0, MAX_LOGPROBS)
        for bias in self.logit_bias.values():
            within("logit_bias", bias, -100, 100)
        within("number of stop strings in stop", len(self.stop), 0, MAX_STOPS, param="stop")
        for stop in self.stop:
            within("length of a stop string in stop", len(stop), 1, MAX_STOP_LENGTH, param="stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def within(name: str, value: float, low: float, high: float | None, param: str | None = None) -> None:
    """Raise RequestError unless low <= value and, if `high` is given, value <= high.

    The error says that the field `param` is invalid; if `param` is None, the field `name`.
    """
    if math.isnan(value) or value < low or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"{low} or more"
        raise RequestError(param or name, f"{name} is {value}; allowed is {span}")
