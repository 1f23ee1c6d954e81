"""Comparison of the engine's tokens and logits with those of plain transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel

from llmsched.engine.architecture.config_fields import read_fields
from llmsched.engine.model.probe import set_attention
from llmsched.engine.model.support import OWN_ATTENTION
from llmsched.engine.parity.cases import ParityPrompt

#: The only attention implementation of transformers that supports windows, sinks and soft-capping in all models.
IMPLEMENTATION = "eager"


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy output of transformers' `generate`: n tokens and their logits [n, V] from one full forward pass."""

    token_ids: tuple[int, ...]
    logits: torch.Tensor
    spread: float  # largest difference between `logits` and the logits of `generate`, which uses a KV cache


class Reference:
    """Plain transformers as the reference, which computes one prompt at a time.

    `make_cache` makes the KV cache of each pass; None: transformers' own.
    """

    def __init__(self, model: PreTrainedModel, make_cache: Callable[[], Cache] | None = None) -> None:
        self._model, self._make_cache = model, make_cache

    def continuation(self, prompt: ListLike[int], num_tokens: int) -> Continuation:
        """Generate `num_tokens` greedy tokens after `prompt`, and ignore end-of-sequence tokens."""
        model = self._plain()
        make_settings: Any = GenerationConfig
        settings = make_settings(
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        # `generate` also applies the model's generation_config (penalties, end of sequence), so clear it.
        own, model.generation_config = model.generation_config, make_settings()
        try:
            with torch.inference_mode():
                ids = torch.tensor([list(prompt)], device=model.device)
                mask = torch.ones_like(ids)
                found = model.generate(ids, attention_mask=mask, generation_config=settings, **self._cache())
        finally:
            model.generation_config = own
        tokens = found.sequences[0, len(prompt) :].tolist()
        logits = self.logits([*prompt, *tokens], len(prompt))
        spread = float(differences(torch.cat(found.logits).cpu(), logits).max())
        return Continuation(tuple(tokens), logits, spread)

    def logits(self, token_ids: ListLike[int], start: int) -> torch.Tensor:
        """Return the logits [len(token_ids) - start, V] that predict token_ids[start:], in host memory.

        They come from one forward pass.
        """
        model = self._plain()
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids[:-1])], device=model.device)
            cache = self._cache()
            logits: torch.Tensor = model(input_ids=ids, use_cache=bool(cache), **cache).logits[0, start - 1 :]
        return logits.to("cpu", copy=True)

    def _cache(self) -> dict[str, Cache]:
        if self._make_cache is None:
            return {}
        # transformers 5.24 has renamed the argument.
        renamed = "cache" in inspect.signature(self._model.forward).parameters
        return {"cache" if renamed else "past_key_values": self._make_cache()}

    def _plain(self) -> Any:
        if type(self._model).__name__ not in OWN_ATTENTION:
            set_attention(self._model, IMPLEMENTATION, required=False)
        return self._model


def differences(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the largest |one - other| over the last dimension, in float64. Equal infinities differ by 0."""
    return torch.where(one == other, 0.0, (one.double() - other.double()).abs()).amax(dim=-1)


@dataclass(frozen=True, slots=True)
class RoundingEffect:
    """Effect of rounding the KV cache on the reference's logits."""

    largest: float  # largest difference of a logit
    kl: float  # mean of KL(not rounded || rounded) over all positions, in nats

    @classmethod
    def of(cls, pairs: ListLike[tuple[torch.Tensor, torch.Tensor]]) -> RoundingEffect:
        """Compare logits [n, V] without and with rounding, one pair for each prompt."""
        largest = max(float(differences(plain, rounded).max()) for plain, rounded in pairs)
        return cls(largest, float(torch.cat([kl_divergence(*pair) for pair in pairs]).mean()))


def kl_divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return KL(expected || found) [n] in nats for logits [n, V], computed in float64."""
    one, other = (logits.double().log_softmax(dim=-1) for logits in (expected, found))
    return torch.where(one.isfinite(), one.exp() * (one - other), 0.0).sum(dim=-1)  # tokens of probability 0 add 0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Rule for how much logits may differ from the reference's, by dtype and kind of model."""

    # The shape of a batch decides in which order floating-point numbers are added. So two correct computations of a
    # logit differ in proportion to the size of the logit. On SmolLM2-135M, whose largest logits are about 40,
    # transformers' generation with a KV cache differs from its full forward pass by up to 8e-5 in float32 and 0.75 in
    # bfloat16.
    #
    # With a rounded KV cache, a tiny difference moves some numbers to the other side of a rounding boundary. The next
    # layers amplify this, so two correct computations may differ about as much as rounding changes the logits at all.

    dtype: torch.dtype
    #: True for a mixture of experts, where rounding may select another expert and change logits abruptly.
    routed: bool = False
    #: Largest change of a logit by a rounded KV cache.
    rounding: float = 0.0

    FLOAT32 = 1e-4
    FLOAT32_SHARE = 5e-6
    SPACINGS = 6

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype, rounding: float = 0.0) -> Tolerance:
        fields = read_fields(model.config)
        return cls(dtype, fields.get("num_experts", default=0) > 1, rounding)

    def limit(self, largest_logit: float) -> float:
        """Return the largest difference allowed if the largest absolute logit is `largest_logit`."""
        if self.dtype == torch.float32:
            return self.rounding + max(self.FLOAT32, self.FLOAT32_SHARE * largest_logit)
        return self.rounding + self.SPACINGS * torch.finfo(self.dtype).eps * largest_logit

    def judged(self, differences: torch.Tensor) -> float:
        """Return the largest of a case's `differences` [n], to be compared with the limit.

        For a mixture of experts in a 16-bit dtype, return the median.
        """
        return float(differences.median() if self.routed and self.dtype != torch.float32 else differences.max())

    @property
    def rule(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self.rounding:
            name += f", {self.rounding:.2g} by which rounding KV changes logits, plus"
        if self.dtype == torch.float32:
            return f"{name}: {self.FLOAT32:g}, or {self.FLOAT32_SHARE:g} of the largest logit if that is more"
        share = self.SPACINGS * torch.finfo(self.dtype).eps
        rule = f"{name}: {share:g} of the largest logit ({self.SPACINGS} spacings of numbers of its size)"
        return f"{rule}, at the median position of a case (rounding may select other experts)" if self.routed else rule


@dataclass(slots=True)
class EngineOutput:
    """Output of the engine for one prompt, with the logits [V] in host memory from which each token was chosen."""

    prompt: ParityPrompt
    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """First output token that differs from the reference."""

    prompt: str
    position: int  # of the token in the output
    expected: int
    got: int
    margin: float  # the reference's logit of `expected` minus its logit of `got`
    explained: bool  # True if the engine's logits differ enough from the reference's to swap these tokens


@dataclass(slots=True)
class CaseResult:
    name: str
    judged_logit_diff: float | None = None  # see `Tolerance.judged`; None if no logits were compared
    tolerance: float = 0.0
    #: [n], the largest difference of logits at each position.
    differences: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    detail: str = ""
    divergences: list[Divergence] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # other faults, such as a failed engine or a missing preemption

    @property
    def tokens_equal(self) -> bool:
        return not self.divergences

    @property
    def max_abs_logit_diff(self) -> float | None:
        return float(self.differences.max()) if len(self.differences) else None

    @property
    def ok(self) -> bool:
        """True if logits are within the tolerance, all divergences are explained, and there are no problems."""
        within = self.judged_logit_diff is not None and self.judged_logit_diff <= self.tolerance
        return within and not self.problems and all(divergence.explained for divergence in self.divergences)


@dataclass(frozen=True, slots=True)
class ParityReport:
    checks: tuple[CaseResult, ...]
    tolerance: Tolerance
    spread: float  # largest `Continuation.spread`
    model_impl: str | None = None  # what computed the engine's logits; None if no engine could be built
    rounding: RoundingEffect | None = None  # of the KV cache; None if it has the type of the model

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def compare(
    result: CaseResult, output: EngineOutput, expected: Continuation, reference: Reference, tolerance: Tolerance
) -> None:
    """Compare the engine's output with the reference's continuation, and add the outcome to `result`."""
    name, prompt, tokens = output.prompt.name, output.prompt.token_ids, output.token_ids
    if output.error is not None or not tokens or len(tokens) != len(output.logits):
        fault = output.error or f"{len(tokens)} tokens from {len(output.logits)} rows of logits"
        result.problems.append(f"{name}: {fault}")
        return
    wanted = expected.logits[: len(tokens)]
    result.tolerance = max(result.tolerance, tolerance.limit(float(wanted[wanted.isfinite()].abs().max())))
    logits = torch.stack(output.logits)
    differing = (place for place, token in enumerate(tokens) if token != expected.token_ids[place])
    if (first := next(differing, None)) is not None:
        result.divergences.append(_divergence(name, first, expected, tokens[first], logits[first]))
        wanted = reference.logits([*prompt, *tokens], len(prompt))
    by_position = differences(logits, wanted)
    if not by_position.isfinite().all():
        result.problems.append(f"{name}: some logits are not numbers")
        return
    result.differences = torch.cat([result.differences, by_position])
    result.judged_logit_diff = tolerance.judged(result.differences)


def _divergence(prompt: str, position: int, expected: Continuation, got: int, logits: torch.Tensor) -> Divergence:
    """Return the Divergence at `position`, explained if its margin is at most twice the largest logit difference."""
    wanted, own = expected.logits[position].double(), expected.token_ids[position]
    margin = float(wanted[own] - wanted[got])
    explained = margin <= 2 * float(differences(logits.double(), wanted))
    return Divergence(prompt, position, own, got, margin, explained)
