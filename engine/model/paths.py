"""Which code computes a model over the paged KV cache."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import BloomForCausalLM, PreTrainedModel

from llmsched.engine.model.bloom import BloomModel
from llmsched.engine.model.paged import LayerShape, PagedContext
from llmsched.engine.model.transformers_model import TransformersModel


class PagedModel(Protocol):
    """A model over the paged cache. `layers` are its KV shapes, `vocab_size` is the width of the logits."""

    layers: list[LayerShape]
    vocab_size: int

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PagedContext, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute input_ids [T] at positions [T], write their KV, return logits [R, vocab_size] in the model's dtype.

        `logit_rows` [R] are the tokens whose logits are needed; None stands for all T of them.
        """
        ...


def paged_model(model: PreTrainedModel) -> PagedModel:
    """The path for a model in evaluation mode on its device. Raises ModelError if it cannot be computed exactly."""
    return BloomModel(model) if isinstance(model, BloomForCausalLM) else TransformersModel(model)
