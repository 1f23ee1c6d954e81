"""What the rest of the engine needs to know of a model without touching its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded (or loadable) model.

    `max_position` is the context the model was made for (tokens). `eos_token_ids` is the union of generation_config,
    config and tokenizer. `sampling_defaults` are the SamplingParams fields that generation_config.json sets; a request
    that leaves the field out gets them.
    """

    name: str
    architecture: str
    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
