"""What plain transformers makes of a prompt, with its own attention."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from llmsched.engine.model.probe import set_attention

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
