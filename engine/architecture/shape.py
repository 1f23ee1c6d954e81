"""What the memory model needs to know of a model, read from its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.fields import Fields, read_fields
from llmsched.engine.architecture.geometry import ConfigReader, Geometry, kv_geometry
from llmsched.engine.architecture.quantised import kv_is_fp8
from llmsched.engine.architecture.weights import Weights, model_weights
from llmsched.engine.errors import ModelError, one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from llmsched.engine.architecture.fields import ConfigCache


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths in numbers, sizes of one layer where layers differ: the largest.

    `inner_size` is the width of the MLP that a token goes through, `query_size` that of all query heads.
    `whole_scores`: attention scores are capped, have sinks or biases, for which a CPU must hold them. `max_position` is
    None where none is stated. `fp8_kv`: the checkpoint has scales for fp8 KV.
    """

    geometry: Geometry
    weights: Weights
    vocab_size: int
    hidden_size: int
    inner_size: int
    max_position: int | None
    notes: tuple[str, ...] = ()
    heads: int = 0
    query_size: int = 0
    whole_scores: bool = False
    fp8_kv: bool = False

    @property
    def exact(self) -> bool:
        """Whether nothing about weights and activations had to be left out."""
        return self.weights.exact and self.vocab_size > 0 and self.hidden_size > 0


def model_shape(
    config: PretrainedConfig | Mapping[str, Any],
    *,
    dtype_bytes: int,
    path: Path | None = None,
    weights: Weights | None = None,
    cache: ConfigCache | None = None,
) -> ModelShape:
    """Read the shape from a transformers config or the content of a config.json.

    `path` is the model's directory, where weight files are looked for; `weights` is taken as given instead. `cache`
    keeps what takes long to find out. Raises ModelError when the config does not say enough, or what it says is of an
    unexpected kind.
    """
    try:
        return _read_shape(config, dtype_bytes, path, weights, cache)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as problem:
        raise ModelError(f"config has a value that cannot be a size ({one_line(problem)})") from problem


def _read_shape(
    config: PretrainedConfig | Mapping[str, Any],
    dtype_bytes: int,
    path: Path | None,
    weights: Weights | None,
    cache: ConfigCache | None,
) -> ModelShape:
    fields = read_fields(config, cache)
    geometry = kv_geometry(fields, dtype_bytes)
    hidden, vocab = fields.get("hidden_size", "n_embd", "d_model"), fields.get("vocab_size")
    position, notes = _max_position(fields)
    if not hidden or not vocab:
        notes += ("activations are not counted in full: the config lacks hidden_size or vocab_size",)
    for name, size in (("hidden_size", hidden), ("vocab_size", vocab), ("max_position_embeddings", position)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise ModelError(f"config has {name} {size!r}; a number of 0 or more is understood")
    heads = ConfigReader(fields).heads() if geometry.caches_kv else 0
    quantised = fields.get("quantization_config")
    return ModelShape(
        geometry=geometry,
        weights=weights or model_weights(path, config, dtype_bytes, cache),
        vocab_size=vocab or 0,
        hidden_size=hidden or 0,
        inner_size=inner_size(fields),
        max_position=position,
        notes=notes,
        heads=heads,
        query_size=heads * max((group.head_dim_k for group in geometry.groups), default=0),
        whole_scores=fields.model_type in ("gpt_oss", "bloom") or bool(fields.get("attn_logit_softcapping")),
        fp8_kv=isinstance(quantised, Mapping) and kv_is_fp8(quantised),
    )


def inner_size(fields: Fields) -> int:
    """Width of the MLP, or of all experts together that one token is sent to."""
    hidden = fields.get("hidden_size", "n_embd", "d_model", default=0)
    dense = fields.get("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    dense = max(dense) if isinstance(dense, list) else dense
    chosen = fields.get("num_experts_per_tok", "top_k_experts", "moe_topk", default=0)
    shared = fields.get("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=0)
    routed = chosen * fields.get("moe_intermediate_size", default=dense) + shared
    return max(int(dense), int(routed))


def _max_position(fields: Fields) -> tuple[int | None, tuple[str, ...]]:
    """The longest context that can be served exactly, and why it is shorter than the model's own if it is.

    Rotary embeddings of the kinds longrope and dynamic change for a whole batch as soon as one of its sequences passes
    the original context, which would make requests depend on each other.
    """
    stated = fields.get("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    original = fields.get("original_max_position_embeddings")
    limits = [stated]
    for rope in _ropes(fields):
        kind = str(rope.get("rope_type", rope.get("type")))
        if kind == "longrope":
            limits.append(rope.get("original_max_position_embeddings", original))
        elif "dynamic" in kind:
            limits.append(original)
    limit = min((each for each in limits if each), default=None)
    if limit == stated:
        return limit, ()
    return limit, (f"context limited to {limit} of {stated} tokens: beyond it the rotary embeddings change",)


def _ropes(fields: Fields) -> list[Mapping[str, Any]]:
    """Settings of the rotary embeddings: one set, or one for each kind of layer."""
    given = fields.get("rope_parameters", "rope_scaling", default={})
    nested = [value for value in given.values() if isinstance(value, Mapping)]
    return nested or [given]
