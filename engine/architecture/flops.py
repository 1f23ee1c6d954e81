"""Arithmetic operations and memory traffic of a model's steps, computed from the model's config."""
# A step reads a matrix of P numbers once and takes 2 P operations per token. If each token uses k of E experts, at
# random, T tokens use E (1 - (1 - k / E) ** T) experts on average.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llmsched.engine.architecture.config_fields import ConfigCache, read_fields, size_errors
from llmsched.engine.architecture.geometry import LayerGroup, LayerReader
from llmsched.engine.architecture.parameters import add_up
from llmsched.engine.architecture.quantization import Arithmetic, Quantization, quantization_of
from llmsched.engine.architecture.shape import inner_size
from llmsched.engine.architecture.weights import modules_of, stored_bytes
from llmsched.engine.errors import ModelError

#: Norms, residuals, rotary embeddings and activation functions read and write this many vectors per token and layer:
#: vectors of width hidden_size, and vectors of the MLP's width. Fitted to `other_ms_per_layer` in microsoft/vidur's
#: profiles (A100, H100, 7B to 70B): within 20 % for 1,024 tokens and more.
_HIDDEN_VECTORS, _INNER_VECTORS = 24, 3


class Matrices(NamedTuple):
    numbers: int  # elements
    size: float  # bytes
    arithmetic: Arithmetic  # type in which the elements are multiplied


class Attention(NamedTuple):
    """Costs of attention in all layers of one kind."""

    windowed: bool
    latent: bool  # True for MLA, whose decodes attend to the same latent vectors in all heads
    kv_bytes: float  # per token
    prefill_flops: float  # per (query, key) pair
    decode_flops: float  # per (query, key) pair


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Costs of a model's steps on any device: arithmetic operations, and bytes that are read and written."""

    layers: int
    dense: Matrices  # matrices that multiply every token
    experts: Matrices  # all routed experts
    num_experts: int
    experts_per_token: int
    head: Matrices  # matrix that computes logits
    vector_bytes: float  # activations read and written per token
    state_bytes: float  # recurrent state read and written per sequence and step
    attention: tuple[Attention, ...]
    window: int | None  # largest sliding window in tokens


@size_errors()
def model_flops(
    config: Mapping[str, Any],
    *,
    dtype_bytes: int,
    kv_dtype_bytes: int | None = None,
    cache: ConfigCache | None = None,
    packed: bool = False,
) -> ModelFlops:
    """Compute a model's costs from the content of a config.json.

    `dtype_bytes` is the bytes of one number in activations and unquantised weights. `kv_dtype_bytes` is the bytes of
    one number in the KV cache (default: `dtype_bytes`). If `packed` is True, quantised weights are held and multiplied
    as `llmsched serve` does, which does not quantise inputs. Raises ModelError if the parameters cannot be counted.
    """
    fields = read_fields(config, cache)
    modules, _ = modules_of(fields)
    parameters = add_up(modules.values())
    hidden, vocab = fields.get("hidden_size"), fields.get("vocab_size")
    if not parameters.total or not hidden or not vocab:
        named = fields.model_type or "a model without model_type"
        raise ModelError(f"{named} cannot be simulated: its parameters cannot be counted from its config")
    reader = LayerReader(fields, dtype_bytes)
    geometry = reader.geometry()
    layers = len(reader.layer_names())
    vectors = _HIDDEN_VECTORS * hidden + _INNER_VECTORS * inner_size(fields)
    count, chosen = (fields.get("num_experts"), fields.get("num_experts_per_tok")) if parameters.experts else (0, 0)
    if parameters.experts and (chosen is None or not 1 <= int(chosen) <= int(count)):
        raise ModelError(f"config sends a token to {chosen} of {int(count)} experts; it must be 1 to {int(count)}")
    form = quantization_of(fields) or Quantization("none")
    form = replace(form, arithmetic="bf16") if packed else form
    sizes = stored_bytes(modules, form, dtype_bytes, packed=packed)
    return ModelFlops(
        layers=layers,
        dense=Matrices(parameters.linear, sizes.linear + sizes.other, form.arithmetic),
        experts=Matrices(parameters.experts, sizes.experts, form.arithmetic),
        num_experts=int(count),
        experts_per_token=int(chosen),
        head=Matrices(hidden * vocab, hidden * vocab * dtype_bytes, "bf16"),
        vector_bytes=layers * vectors * dtype_bytes,
        state_bytes=2.0 * geometry.state_bytes_per_seq,
        attention=tuple(
            _attention(group, reader, kv_dtype_bytes or dtype_bytes)
            for group in geometry.groups
            if group.kind != "state"
        ),
        window=geometry.window,
    )


def _attention(group: LayerGroup, reader: LayerReader, kv_bytes: int) -> Attention:
    heads = reader.heads()
    prefill = decode = 2 * heads * (group.head_dim_k + group.head_dim_v)
    if (widths := group.latent) is not None:
        prefill = 2 * heads * (widths.key + widths.rope + widths.value)
        decode = 2 * heads * (2 * widths.rank + widths.rope)
    return Attention(
        windowed=group.window is not None,
        latent=group.kind == "mla",
        kv_bytes=group.bytes_per_token(kv_bytes),
        prefill_flops=float(group.layers * prefill),
        decode_flops=float(group.layers * decode),
    )
