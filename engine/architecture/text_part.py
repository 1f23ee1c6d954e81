"""Text part of multimodal models: its settings in config.json, and its tensors in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from llmsched.engine.architecture.config_fields import nested_text

_Tensor = TypeVar("_Tensor")

#: Types of multimodal models whose text part is served, with the type of that part if config.json does not state it.
_TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
#: Settings of the whole model that replace those of its text part.
_OF_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config")
_TEXT_NAME = re.compile(r"(model\.)?language_model\.(model\.)?(?P<rest>.+)")
_ENCODER_NAME = re.compile(
    r"(model\.)?(vision_tower|visual|vision_embedder|audio_tower|multi_modal_projector|embed_(vision|audio))\."
)


def text_config(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a multimodal model's text part. Return other configs as they are."""
    text, whole = nested_text(content), str(content.get("model_type"))
    names = content.get("architectures") or ("ForConditionalGeneration",)
    if text is None or whole not in _TEXT_TYPES or not str(names[0]).endswith("ForConditionalGeneration"):
        return content
    kind = str(text.get("model_type", _TEXT_TYPES[whole]))
    if kind not in _CLASSES:
        return content
    shared = {name: content[name] for name in _OF_WHOLE if content.get(name) is not None}
    return {**text, **shared, "model_type": kind, "architectures": [_CLASSES[kind]]}


def text_tensors(stored: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Return the text part's tensors in a checkpoint, under the names of a text model.

    A checkpoint of a text model is returned as it is.
    """
    if not any(map(_TEXT_NAME.match, stored)):
        return dict(stored)
    return {_text_name(name): tensor for name, tensor in stored.items() if not _ENCODER_NAME.match(name)}


def _text_name(name: str) -> str:
    if (match := _TEXT_NAME.fullmatch(name)) is None:
        return name
    rest = match["rest"]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"
