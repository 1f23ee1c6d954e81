"""How many bytes a model's weights take once loaded: from the files' headers, else counted from the config."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsched.engine.errors import ModelError
from llmsched.engine.kv.fields import Fields, read_fields, transformers_config

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_MAX_HEADER = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class Weights:
    """`count` bytes in the serving type; `source` tells where from, `exact` whether nothing had to be assumed."""

    count: int
    source: str
    exact: bool
    notes: tuple[str, ...] = ()


def model_weights(path: Path | None, config: Any, dtype_bytes: int) -> Weights:
    """Bytes of the weights of the model at `path` (a directory) when served in a type of `dtype_bytes`.

    `config` is a transformers config, the content of a config.json, or Fields. Floating-point tensors are converted on
    loading and count dtype_bytes per number; quantised ones count as stored. Without safetensors files the parameters
    are counted from the config, tied embeddings once. Where neither is possible the count is 0 and a note says so.

    Raises ModelError for a damaged file.
    """
    fields = config if isinstance(config, Fields) else read_fields(config)
    files = _safetensors_files(path) if path is not None and path.is_dir() else []
    if files:
        return _from_headers(files, dtype_bytes, tied=bool(fields.get("tie_word_embeddings")))
    notes = []
    if quantised := fields.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        notes.append(
            f"the checkpoint is quantised ({method}); without its files weights count {dtype_bytes} bytes each"
        )
    parameters = _plain_parameters(fields) or _built_parameters(config)
    if parameters is None:
        named = fields.model_type or "no model_type"
        notes = [f"weights are not counted ({named}: neither files nor a known layout); give their size with --weights"]
        return Weights(0, "unknown", exact=False, notes=tuple(notes))
    return Weights(parameters * dtype_bytes, "config", exact=not notes, notes=tuple(notes))


def _safetensors_files(directory: Path) -> list[Path]:
    """The weight files that are there; a download that lacks shards counts as none, since the sum would be wrong."""
    if (directory / _INDEX).is_file():
        content = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        files = [directory / name for name in sorted(set(content.get("weight_map", {}).values()))]
    else:
        files = [directory / _SINGLE]
    return files if all(file.is_file() for file in files) else []


def _from_headers(files: list[Path], dtype_bytes: int, tied: bool) -> Weights:
    count, stored = 0, set()
    for file in files:
        for name, tensor in _header(file).items():
            if name == "__metadata__" or (tied and name == "lm_head.weight"):
                continue
            if tensor["dtype"] in _FLOATS:
                count += math.prod(tensor["shape"]) * dtype_bytes
            else:
                start, end = tensor["data_offsets"]
                count += end - start
                stored.add(tensor["dtype"])
    notes = (f"tensors of type {', '.join(sorted(stored))} count as stored",) if stored else ()
    return Weights(count, "safetensors", exact=True, notes=notes)


def _header(file: Path) -> dict[str, Any]:
    """A safetensors header: eight bytes of length (little-endian), then that much JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            if length > _MAX_HEADER:
                raise ValueError(f"header of {length} bytes")
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as problem:
            raise ModelError(f"{file}: is no safetensors file or is cut short ({problem})") from problem
    return header


def _plain_parameters(fields: Fields) -> int | None:
    """Parameters of the families whose layout is simple enough to count; None for the others."""
    layer = {
        "llama": _dense_layer,
        "mistral": _dense_layer,
        "qwen2": _dense_layer,
        "qwen3": _dense_layer,
        "mixtral": _mixtral_layer,
        "qwen3_moe": _qwen_moe_layer,
    }.get(fields.model_type)
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    if layer is None or any(fields.get(name) is None for name in needed):
        return None
    hidden = fields.get("hidden_size")
    embeddings = fields.get("vocab_size") * hidden * (1 if _tied(fields) else 2)
    per_layer = (layer(fields, index) + _attention(fields) + 2 * hidden for index in range(_layers(fields)))
    return int(embeddings + sum(per_layer) + hidden)


def _tied(fields: Fields) -> bool:
    return bool(fields.get("tie_word_embeddings", default=False))


def _layers(fields: Fields) -> int:
    return int(fields.get("num_hidden_layers"))


def _attention(fields: Fields) -> int:
    """q, k, v and o projections with the biases and norms of the family."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    head_dim = fields.get("head_dim", default=hidden // heads)
    query, key_value = heads * head_dim, 2 * fields.get("num_key_value_heads", default=heads) * head_dim
    count = hidden * (2 * query + key_value)
    if fields.model_type == "qwen2":
        count += query + key_value
    elif fields.get("attention_bias") and fields.model_type in ("llama", "qwen3", "qwen3_moe"):
        count += query + key_value + hidden
    if fields.model_type in ("qwen3", "qwen3_moe"):
        count += 2 * head_dim
    return int(count)


def _dense_layer(fields: Fields, index: int) -> int:
    """Gate, up and down projections."""
    hidden, inner = fields.get("hidden_size"), fields.get("intermediate_size")
    has_bias = fields.model_type == "llama" and fields.get("mlp_bias")
    return int(3 * hidden * inner + (2 * inner + hidden if has_bias else 0))


def _mixtral_layer(fields: Fields, index: int) -> int:
    return _experts(fields, fields.get("num_local_experts"), fields.get("intermediate_size"))


def _qwen_moe_layer(fields: Fields, index: int) -> int:
    """Experts, except in the layers that the config keeps dense."""
    step = fields.get("decoder_sparse_step", default=1)
    if index in fields.get("mlp_only_layers", default=()) or (index + 1) % step:
        return _dense_layer(fields, index)
    return _experts(fields, fields.get("num_experts", "num_local_experts"), fields.get("moe_intermediate_size"))


def _experts(fields: Fields, experts: int, inner: int) -> int:
    """Every expert's gate, up and down projections, and the router."""
    return int(experts * (3 * fields.get("hidden_size") * inner + fields.get("hidden_size")))


def _built_parameters(config: Any) -> int | None:
    """Count by building the model without memory (torch's meta device), which takes seconds; None if it cannot be."""
    made = transformers_config(config) if isinstance(config, Mapping) else config
    if made is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    made = copy.deepcopy(made)
    made.quantization_config = None
    autos: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    for auto in autos:
        if type(made) in auto._model_mapping:
            with torch.device("meta"):
                model = auto.from_config(made)
            model.tie_weights()
            return sum(int(parameter.numel()) for parameter in model.parameters())
    return None
