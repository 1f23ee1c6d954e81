"""Sizes of a model that memory planning needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.config_fields import ConfigCache, Fields, read_fields, size_errors
from llmsched.engine.architecture.context_limit import max_position
from llmsched.engine.architecture.geometry import Geometry, LayerReader, kv_geometry
from llmsched.engine.architecture.quantization import quantization_of
from llmsched.engine.architecture.weights import Weights, model_weights
from llmsched.engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model. Where layers differ, the size of the largest layer counts."""

    geometry: Geometry
    weights: Weights
    vocab_size: int
    hidden_size: int
    inner_size: int  # width of the MLP that one token passes through, or of all its experts together
    max_position: int | None  # longest context in tokens; None if it is unlimited
    notes: tuple[str, ...] = ()
    heads: int = 0
    query_size: int = 0  # width of all query heads together
    whole_scores: bool = False  # True if a CPU must hold all attention scores at once
    fp8_kv: bool = False  # True if the checkpoint has scales for an fp8 KV cache
    experts_per_token: int = 0
    num_experts: int = 0  # routed experts of a layer
    expert_size: int = 0  # width of one routed expert
    exact: bool = True  # True if all weights and activations are counted exactly


@size_errors()
def model_shape(
    config: PretrainedConfig | Mapping[str, Any],
    *,
    dtype_bytes: int,
    path: Path | None = None,
    weights: Weights | None = None,
    cache: ConfigCache | None = None,
    packed: bool = True,
    rounding: str | None = None,
) -> ModelShape:
    """Return the sizes of a model from a transformers config or the content of a config.json.

    `dtype_bytes` is the bytes of one number in the model's type. If `weights` is None, `model_weights` computes them
    and gets `path`, `packed` and `rounding`. Otherwise these three have no effect. Raises ModelError if the config does
    not describe the layers or has a size of the wrong type.
    """
    fields = read_fields(config, cache)
    geometry = kv_geometry(fields, dtype_bytes)
    weights = weights or model_weights(path, fields, dtype_bytes, packed=packed, rounding=rounding)
    fields = fields.reread()
    position, notes = max_position(fields)
    hidden, vocab = fields.get("hidden_size"), fields.get("vocab_size")
    if not hidden or not vocab:
        notes += ("activations are not counted in full: the config lacks hidden_size or vocab_size",)
    for name, size in (("hidden_size", hidden), ("vocab_size", vocab), ("max_position_embeddings", position)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise ModelError(f"config has {name} {size!r}; it must be a whole number, 0 or more")
    heads = LayerReader(fields).heads() if geometry.caches_kv else 0
    quantization, (chosen, expert_size) = quantization_of(fields), expert_sizes(fields)
    assumed = tuple(fields.assumed())
    if fields.get("num_experts") and not fields.get("num_experts_per_tok"):
        assumed += ("activations are not counted in full: the config does not state num_experts_per_tok",)
    return ModelShape(
        geometry=geometry,
        weights=weights,
        vocab_size=vocab or 0,
        hidden_size=hidden or 0,
        inner_size=inner_size(fields),
        max_position=position,
        notes=notes + assumed,
        heads=heads,
        query_size=heads * max((group.head_dim_k for group in geometry.groups), default=0),
        whole_scores=fields.model_type in ("gpt_oss", "bloom", "mpt")
        or bool(fields.get("attn_logit_softcapping") or fields.get("alibi")),
        experts_per_token=chosen,
        num_experts=int(fields.get("num_experts") or 0),
        expert_size=expert_size,
        fp8_kv=quantization is not None and quantization.fp8_kv,
        exact=weights.exact and bool(vocab and hidden) and not assumed,
    )


def inner_size(fields: Fields) -> int:
    """Return the width of the dense MLP or of all experts that one token uses, whichever is larger."""
    chosen, size = expert_sizes(fields)
    return max(_dense_size(fields), chosen * size + int(fields.get("shared_expert_intermediate_size") or 0))


def expert_sizes(fields: Fields) -> tuple[int, int]:
    """Return the number of routed experts that one token uses, and the width of one expert."""
    size = fields.get("moe_intermediate_size", default=_dense_size(fields))
    return int(fields.get("num_experts_per_tok") or 0), int(size)


def _dense_size(fields: Fields) -> int:
    return int(max(fields.mlp_size) if isinstance(fields.mlp_size, list) else fields.mlp_size)
