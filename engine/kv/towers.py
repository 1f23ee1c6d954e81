"""Parameters of the parts of multimodal models that see, for those whose layout is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]


def tower_parameters(config: Settings) -> int | None:
    """Numbers outside the language model of a config.json's content; 0 where it is text alone, None if not known.

    Parts that hear are not known.
    """
    vision = config.get("vision_config")
    if any(config.get(name) for name in ("audio_config", "speech_config")):
        return None
    if not isinstance(vision, Mapping):
        return 0
    count = _TOWERS.get(str(config.get("model_type")))
    try:
        return None if count is None else count(vision, config["text_config"])
    except KeyError:  # a setting is left to its class default, or asks for more than is known
        return None


def _layer_norm(size: int) -> int:
    return 2 * size


def _dense(rows: int, columns: int) -> int:
    """A matrix with its bias."""
    return rows * columns + rows


def _qwen3_vl(vision: Settings, text: Settings) -> int:
    """Qwen3-VL, Qwen3.5: learned positions, plain blocks, one merger and one for each deepstack layer."""
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    block = 2 * _layer_norm(hidden) + _dense(3 * hidden, hidden) + _dense(hidden, hidden)
    block += _dense(inner, hidden) + _dense(hidden, inner)
    merged = hidden * vision["spatial_merge_size"] ** 2
    merger = _dense(merged, merged) + _dense(out, merged)
    deep = len(vision["deepstack_visual_indexes"])
    total = _dense(hidden, patch) + vision["num_position_embeddings"] * hidden + vision["depth"] * block
    return int(total + merger + _layer_norm(hidden) + deep * (merger + _layer_norm(merged)))


def _gemma3(vision: Settings, text: Settings) -> int:
    """SigLIP without its pooling head, and one projection."""
    if vision["vision_use_head"]:
        raise KeyError("vision_use_head")
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    patch = vision.get("num_channels", 3) * vision["patch_size"] ** 2
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    block = 2 * _layer_norm(hidden) + 4 * _dense(hidden, hidden) + _dense(inner, hidden) + _dense(hidden, inner)
    total = _dense(hidden, patch) + positions * hidden + vision["num_hidden_layers"] * block + _layer_norm(hidden)
    return int(total + hidden * text["hidden_size"] + hidden)


def _gemma4(vision: Settings, text: Settings) -> int:
    """Gated blocks with four norms and norms of queries and keys; two tables of positions, one projection."""
    hidden, head_dim = vision["hidden_size"], vision["head_dim"]
    query, key = vision["num_attention_heads"] * head_dim, vision["num_key_value_heads"] * head_dim
    block = 2 * hidden * (query + key) + 3 * hidden * vision["intermediate_size"] + 4 * hidden + 2 * head_dim
    patches = 3 * vision["patch_size"] ** 2 * hidden + 2 * vision["position_embedding_size"] * hidden
    return int(patches + vision["num_hidden_layers"] * block + hidden * text["hidden_size"])


_TOWERS: Mapping[str, Callable[[Settings, Settings], int]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
