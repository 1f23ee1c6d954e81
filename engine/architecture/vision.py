"""Counts of the parameters of vision encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmsched.engine.architecture.config_fields import nested_text

Settings = Mapping[str, Any]


def encoder_parameters(config: Settings) -> int | None:
    """Return the number of parameters outside the language model. 0: a text model. None: the number is unknown."""
    vision = config.get("vision_config")
    if any(config.get(name) for name in ("audio_config", "speech_config")):
        return None
    if not isinstance(vision, Mapping):
        return None if nested_text(config) is not None or config.get("model_type") in _ENCODERS else 0
    count = _ENCODERS.get(str(config.get("model_type")))
    try:
        return None if count is None else count(config, vision)
    except KeyError:  # a setting is missing, or adds parts that are not counted
        return None


def can_be_built(config: Settings) -> bool:
    """Return True if the model has encoders whose parameters can only be counted by building the model."""
    described = any(isinstance(config.get(f"{name}_config"), Mapping) for name in ("vision", "audio", "speech"))
    return described and str(config.get("model_type")) not in _ENCODERS


def _dense(rows: int, columns: int) -> int:
    return rows * columns + rows  # the matrix and its bias


def _plain_block(hidden: int, inner: int) -> int:
    return 4 * hidden + 4 * _dense(hidden, hidden) + _dense(inner, hidden) + _dense(hidden, inner)


def _qwen3_vl(config: Settings, vision: Settings) -> int:
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    blocks = vision["depth"] * _plain_block(hidden, inner)
    embedded = _patches(vision, hidden) + hidden + vision["num_position_embeddings"] * hidden
    merger = _merger(vision, hidden, out)
    deep = merger + 2 * hidden * vision["spatial_merge_size"] ** 2
    return int(embedded + blocks + merger + 2 * hidden + len(vision["deepstack_visual_indexes"]) * deep)


def _qwen2_vl(config: Settings, vision: Settings) -> int:
    hidden, out = vision["embed_dim"], vision["hidden_size"]
    blocks = vision["depth"] * _plain_block(hidden, int(hidden * vision["mlp_ratio"]))
    return int(_patches(vision, hidden) + blocks + 2 * hidden + _merger(vision, hidden, out))


def _qwen2_5_vl(config: Settings, vision: Settings) -> int:
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    block = 2 * hidden + 4 * _dense(hidden, hidden) + 2 * _dense(inner, hidden) + _dense(hidden, inner)
    return int(_patches(vision, hidden) + vision["depth"] * block + hidden + _merger(vision, hidden, out))


def _patches(vision: Settings, hidden: int) -> int:
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    return int(channels * vision["temporal_patch_size"] * vision["patch_size"] ** 2 * hidden)


def _merger(vision: Settings, hidden: int, out: int) -> int:
    merged = hidden * vision["spatial_merge_size"] ** 2
    return int(_dense(merged, merged) + _dense(out, merged))


def _mistral3(config: Settings, vision: Settings) -> int:
    hidden, inner, text = vision["hidden_size"], vision["intermediate_size"], config["text_config"]["hidden_size"]
    heads = vision["num_attention_heads"] * vision["head_dim"]
    block = 2 * hidden + 4 * hidden * heads + 3 * hidden * inner
    patches = vision.get("num_channels", 3) * vision["patch_size"] ** 2 * hidden + hidden
    merger = hidden * hidden * config.get("spatial_merge_size", 2) ** 2 + hidden
    projections = text * hidden + text * text + (2 * text if config.get("multimodal_projector_bias") else 0)
    return int(patches + vision["num_hidden_layers"] * block + merger + projections)


def _gemma3(config: Settings, vision: Settings) -> int:
    if vision["vision_use_head"]:
        raise KeyError("vision_use_head")
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = vision.get("num_channels", 3) * vision["patch_size"] ** 2
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    blocks = vision["num_hidden_layers"] * _plain_block(hidden, inner)
    total = _dense(hidden, patch) + positions * hidden + blocks + 2 * hidden
    return int(total + hidden * config["text_config"]["hidden_size"] + hidden)


def _gemma4(config: Settings, vision: Settings) -> int:
    hidden, head_dim = vision["hidden_size"], vision["head_dim"]
    query, key = vision["num_attention_heads"] * head_dim, vision["num_key_value_heads"] * head_dim
    block = 2 * hidden * (query + key) + 3 * hidden * vision["intermediate_size"] + 4 * hidden + 2 * head_dim
    patches = 3 * vision["patch_size"] ** 2 * hidden + 2 * vision["position_embedding_size"] * hidden
    return int(patches + vision["num_hidden_layers"] * block + hidden * config["text_config"]["hidden_size"])


_ENCODERS: Mapping[str, Callable[[Settings, Settings], int]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
