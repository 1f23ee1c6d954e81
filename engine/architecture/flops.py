"""Arithmetic and memory traffic of a model's steps: its matrices and its attention, read from its config.

A matrix of P numbers takes 2 P operations for each token and is read once in each step. Of E experts with k for each
token, T tokens reach E (1 - (1 - k / E) ** T) if the choices are independent and even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmsched.engine.architecture.fields import ConfigCache, Fields, read_fields, size_errors
from llmsched.engine.architecture.geometry import LayerGroup, LayerReader
from llmsched.engine.architecture.parameters import Parameters
from llmsched.engine.architecture.quantization import Arithmetic, Quantization, quantization_of
from llmsched.engine.architecture.shape import inner_size
from llmsched.engine.architecture.weights import parameters_of
from llmsched.engine.errors import ModelError

#: Vectors of hidden_size and of the MLP's width that norms, residuals, rotations and activations move for one token in
#: one layer. Fitted to `other_ms_per_layer` in microsoft/vidur's profiles (A100, H100, 7B to 70B): within 20 % from
#: 1,024 tokens on.
_HIDDEN_VECTORS, _INNER_VECTORS = 24, 3


class Matrices(NamedTuple):
    """Matrices of `numbers` numbers in `size` bytes, multiplied in `arithmetic`."""

    numbers: int
    size: float
    arithmetic: Arithmetic


class Attention(NamedTuple):
    """Attention of all layers of one kind: bytes of KV per token, and operations per (query, key) pair.

    `windowed` layers see only the last tokens. `latent` layers (MLA) prefill with whole heads, but decode all heads on
    one latent vector, which is a matrix product.
    """

    windowed: bool
    latent: bool
    kv_bytes: float
    prefill_flops: float
    decode_flops: float


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Costs of a model's steps, independent of the device.

    `dense` are the matrices that every token is multiplied with, `experts` all routed experts (a token is sent to
    `experts_per_token` of `num_experts` in each layer), `head` computes the logits. `vector_bytes` is the other traffic
    per token, `state_bytes` the traffic of recurrent state per sequence and step. `window` is the largest window in
    tokens.
    """

    layers: int
    dense: Matrices
    experts: Matrices
    num_experts: int
    experts_per_token: int
    head: Matrices
    vector_bytes: float
    state_bytes: float
    attention: tuple[Attention, ...]
    window: int | None

    @property
    def active_parameters(self) -> float:
        """Numbers that one token is multiplied with."""
        share = self.experts_per_token / self.num_experts if self.num_experts else 0.0
        return self.dense.numbers + self.experts.numbers * share + self.head.numbers


def model_flops(
    config: Mapping[str, Any], *, dtype_bytes: int, kv_dtype_bytes: int | None = None, cache: ConfigCache | None = None
) -> ModelFlops:
    """Read the costs of a model from the content of its config.json.

    `dtype_bytes` is the size of activations and of weights that are not quantised, `kv_dtype_bytes` that of KV
    (default: the same). A checkpoint whose weights and activations are fp8 is multiplied in fp8, all others in 16 bits.

    Raises ModelError if the parameters cannot be counted, or the config lacks a size or states a wrong one.
    """
    with size_errors():
        fields = read_fields(config, cache)
        parameters, _ = parameters_of(fields)
        hidden, vocab = fields.hidden_size, fields.vocab_size
        if not parameters.total or not hidden or not vocab:
            named = fields.model_type or "a model without model_type"
            raise ModelError(f"{named} cannot be simulated: its parameters cannot be counted from its config")
        reader = LayerReader(fields, dtype_bytes)
        groups = reader.geometry().groups
        layers = len(reader.layer_names())
        vectors = _HIDDEN_VECTORS * hidden + _INNER_VECTORS * inner_size(fields)
        count, chosen = _experts(fields) if parameters.experts else (0, 0)
        dense, experts = _matrices(parameters, quantization_of(fields), dtype_bytes)
        return ModelFlops(
            layers=layers,
            dense=dense,
            experts=experts,
            num_experts=count,
            experts_per_token=chosen,
            head=Matrices(hidden * vocab, hidden * vocab * dtype_bytes, "bf16"),
            vector_bytes=layers * vectors * dtype_bytes,
            state_bytes=2.0 * sum(group.layers * group.state_bytes for group in groups),
            attention=tuple(
                _attention(group, fields, reader, kv_dtype_bytes or dtype_bytes)
                for group in groups
                if group.kind != "state"
            ),
            window=max((group.window for group in groups if group.window is not None), default=None),
        )


def _experts(fields: Fields) -> tuple[int, int]:
    """Return the number of routed experts of a layer, and to how many of them a token is sent."""
    count, chosen = int(fields.num_experts), fields.experts_per_token
    if chosen is None or not 1 <= int(chosen) <= count:
        raise ModelError(f"config sends a token to {chosen} of {count} experts; it must be 1 to {count}")
    return count, int(chosen)


def _matrices(parameters: Parameters, quantization: Quantization | None, dtype_bytes: int) -> tuple[Matrices, Matrices]:
    """Return dense and routed matrices; routers, norms and biases count with the dense ones."""
    form = quantization or Quantization("none")
    linear, expert = (bits / 8 if bits is not None else dtype_bytes for bits in (form.linear_bits, form.expert_bits))
    return (
        Matrices(parameters.linear, parameters.linear * linear + parameters.other * dtype_bytes, form.arithmetic),
        Matrices(parameters.experts, parameters.experts * expert, form.arithmetic),
    )


def _attention(group: LayerGroup, fields: Fields, reader: LayerReader, kv_bytes: int) -> Attention:
    heads = reader.heads()
    pair = 2 * heads * (group.head_dim_k + group.head_dim_v)
    if group.kind == "mla":
        whole = group.expanded // heads
        latent = 2 * heads * (group.head_dim_k + int(fields.get("kv_lora_rank")))
        prefill, decode = 2 * heads * whole, latent
    else:
        prefill = decode = pair
    return Attention(
        windowed=group.window is not None,
        latent=group.kind == "mla",
        kv_bytes=group.bytes_per_token(kv_bytes),
        prefill_flops=float(group.layers * prefill),
        decode_flops=float(group.layers * decode),
    )
