"""Comparing the engine's tokens and logits with those of plain transformers."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from llmsched.engine.model.probe import set_attention
from llmsched.engine.parity.cases import ParityPrompt

#: Names under which configs say how many experts a token may be sent to.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
#: The one implementation that honours everything a model asks for: windows, sinks, soft-capping.
IMPLEMENTATION = "eager"


@dataclass(frozen=True, slots=True)
class Continuation:
    """`token_ids` [n] are those of `generate`, greedy; `logits` [n, V], on the CPU, chose them in one full pass.

    `spread` is the largest difference between those logits and the ones that `generate` chose by, token by token with
    its own KV cache: how far transformers is from itself.
    """

    token_ids: tuple[int, ...]
    logits: torch.Tensor
    spread: float


class Reference:
    """Runs `model` with its eager attention, one prompt at a time. Leaves that attention in it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def continuation(self, prompt: ListLike[int], num_tokens: int) -> Continuation:
        """`num_tokens` greedy tokens after `prompt`, end-of-sequence tokens or not."""
        model: Any = self._model
        set_attention(model, IMPLEMENTATION)
        make_settings: Any = GenerationConfig
        settings = make_settings(
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        # What the model's own generation_config asks for (penalties, end of sequence) would be added to ours.
        own, model.generation_config = model.generation_config, make_settings()
        try:
            with torch.inference_mode():
                ids = torch.tensor([list(prompt)], device=model.device)
                found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        finally:
            model.generation_config = own
        tokens = found.sequences[0, len(prompt) :].tolist()
        logits = self.logits([*prompt, *tokens], len(prompt))
        spread = float(differences(torch.cat(found.logits).cpu(), logits).max())
        return Continuation(tuple(tokens), logits, spread)

    def logits(self, token_ids: ListLike[int], start: int) -> torch.Tensor:
        """Logits [len(token_ids) - start, V], on the CPU, that predict token_ids[start:] in one full pass."""
        set_attention(self._model, IMPLEMENTATION)
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids[:-1])], device=self._model.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0, start - 1 :]
        return logits.to("cpu", copy=True)


def differences(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """max |one - other| over the last dimension, in float64; equal infinities do not differ, NaN gives NaN."""
    return torch.where(one == other, 0.0, (one.double() - other.double()).abs()).amax(dim=-1)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart correct logits may be, for one model.

    A floating-point sum depends on its order, and the order on the shape of the batch, so correct computations differ,
    in proportion to the size of the logits. Measured on SmolLM2-135M, whose largest logits are about 40: transformers'
    own cached generation differs from its own full pass by up to 8e-5 in float32 and 0.75 in bfloat16.

    `routed` marks a mixture of experts. There rounding may choose another expert, and logits jump; so in types shorter
    than float32 not every position is held to the limit, but their median: only float32 tells small faults there.
    """

    dtype: torch.dtype
    routed: bool = False

    FLOAT32 = 1e-4
    FLOAT32_SHARE = 5e-6
    SPACINGS = 6

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> Tolerance:
        config = model.config.get_text_config()
        return cls(dtype, any((getattr(config, name, None) or 0) > 1 for name in EXPERT_COUNTS))

    def limit(self, largest_logit: float) -> float:
        if self.dtype == torch.float32:
            return max(self.FLOAT32, self.FLOAT32_SHARE * largest_logit)
        return self.SPACINGS * torch.finfo(self.dtype).eps * largest_logit

    def judged(self, differences: torch.Tensor) -> float:
        """Of the differences [n] at a check's positions, the one that must be within the limit."""
        return float(differences.median() if self.routed and self.dtype != torch.float32 else differences.max())

    @property
    def rule(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self.dtype == torch.float32:
            return f"{name}: {self.FLOAT32:g}, or {self.FLOAT32_SHARE:g} of the largest logit where that is more"
        share = self.SPACINGS * torch.finfo(self.dtype).eps
        rule = f"{name}: {share:g} of the largest logit ({self.SPACINGS} spacings of its numbers there)"
        return (
            f"{rule}, at each sequence's median position (rounding may choose other experts)" if self.routed else rule
        )


@dataclass(slots=True)
class Answer:
    """What the engine made of one prompt: n tokens and the logits [V] that chose each, on the CPU."""

    prompt: ParityPrompt
    token_ids: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Parting:
    """Output token `position` of `prompt` is the first that differs.

    `margin` is by how much the reference's logit of its own token (`expected`) exceeds that of the engine's (`got`);
    `explained` says that the difference between the two computations at this position is large enough to turn it.
    """

    prompt: str
    position: int
    expected: int
    got: int
    margin: float
    explained: bool


@dataclass(slots=True)
class CaseResult:
    """One way of scheduling, compared. `max_abs_logit_diff` is None where nothing could be compared.

    `judged_logit_diff` is what must be within `tolerance`, see Tolerance.judged. `differences` has the largest at each
    position.
    `problems` say what else was wrong: something did not happen that the check is about, or the engine raised.
    """

    name: str
    tokens_equal: bool = True
    max_abs_logit_diff: float | None = None
    judged_logit_diff: float | None = None
    tolerance: float = 0.0
    differences: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    detail: str = ""
    partings: list[Parting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Logits within tolerance, tokens equal or parted at a near tie, and nothing else wrong."""
        within = self.judged_logit_diff is not None and self.judged_logit_diff <= self.tolerance
        return within and not self.problems and all(parting.explained for parting in self.partings)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All checks of one model. `spread` is how far transformers' cached generation is from its own full pass."""

    checks: tuple[CaseResult, ...]
    tolerance: Tolerance
    spread: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def compare(
    result: CaseResult, answer: Answer, expected: Continuation, reference: Reference, tolerance: Tolerance
) -> None:
    """Add to `result` how an answer compares with the reference's continuation of the same prompt.

    Where tokens part, the reference is computed anew after the engine's own, so that logits are always compared after
    the same history.
    """
    name, prompt, tokens = answer.prompt.name, answer.prompt.token_ids, answer.token_ids
    if answer.error is not None or not tokens or len(tokens) != len(answer.logits):
        fault = answer.error or f"{len(tokens)} tokens from {len(answer.logits)} rows of logits"
        result.problems.append(f"{name}: {fault}")
        return
    wanted = expected.logits[: len(tokens)]
    result.tolerance = max(result.tolerance, tolerance.limit(float(wanted[wanted.isfinite()].abs().max())))
    logits = torch.stack(answer.logits)
    places = (place for place, token in enumerate(tokens) if token != expected.token_ids[place])
    if (parted := next(places, None)) is not None:
        result.tokens_equal = False
        result.partings.append(_parting(name, parted, expected, tokens[parted], logits[parted]))
        wanted = reference.logits([*prompt, *tokens], len(prompt))
    by_position = differences(logits, wanted)
    if not by_position.isfinite().all():
        result.problems.append(f"{name}: some logits are not numbers")
        return
    result.differences = torch.cat([result.differences, by_position])
    result.max_abs_logit_diff = float(result.differences.max())
    result.judged_logit_diff = tolerance.judged(result.differences)


def _parting(prompt: str, position: int, expected: Continuation, got: int, logits: torch.Tensor) -> Parting:
    """Judge a parting. A correct choice between logits that are off by d turns a margin of 2 d at most."""
    wanted, own = expected.logits[position].double(), expected.token_ids[position]
    margin = float(wanted[own] - wanted[got])
    explained = margin <= 2 * float(differences(logits.double(), wanted))
    return Parting(prompt, position, own, got, margin, explained)
