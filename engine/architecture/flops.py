"""What computing costs in arithmetic and memory traffic: a model's matrices and attention, read from its config.

A matrix of P numbers takes 2 P operations for each token and is read once for each step. Of E experts with k for each
token, T tokens touch E (1 - (1 - k / E) ** T) if the choices are independent and even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from llmsched.engine.architecture.fields import ConfigCache, Fields, read_fields
from llmsched.engine.architecture.geometry import ConfigReader, LayerGroup
from llmsched.engine.architecture.parameters import Parameters
from llmsched.engine.architecture.quantised import weight_format
from llmsched.engine.architecture.shape import inner_size
from llmsched.engine.architecture.weights import parameters_of
from llmsched.engine.errors import ModelError, one_line

#: How matrices are multiplied: in 16 bits (or in float32, where that is the type of activations), in fp8 with one scale
#: for a whole matrix or row, or in fp8 with a scale for each block, which takes longer.
Arithmetic = Literal["bf16", "fp8", "fp8_block"]

#: Vectors of hidden_size and of the MLP's width that norms, residuals, rotations and activations move for one token in
#: one layer. Fitted to the `other_ms_per_layer` of microsoft/vidur's profiles (A100, H100, 7B to 70B), which they give
#: within 20 % from 1,024 tokens on.
_HIDDEN_VECTORS, _INNER_VECTORS = 24, 3


class Matrices(NamedTuple):
    """So many `numbers` in `size` bytes, multiplied in `arithmetic`."""

    numbers: int
    size: float
    arithmetic: Arithmetic


class Attention(NamedTuple):
    """One kind of layers together: bytes of KV per token, and operations per (query, key) pair of prefill and decode.

    Layers with `windowed` see only the last tokens. Those with `latent` (MLA) decode all heads on one latent vector,
    which is a product of matrices, and prefill on whole heads.
    """

    windowed: bool
    latent: bool
    kv_bytes: float
    prefill_flops: float
    decode_flops: float


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """A model's cost apart from the device.

    `dense` are the matrices all tokens go through, `experts` the routed ones
    (all of them; a token goes through `experts_per_token` of `num_experts` in each layer), `head` makes the logits.
    `vector_bytes` is what else is moved per token, `state_bytes` is read and written per sequence and step. `window` is
    the largest window in tokens.
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
    """Read a config.json's content. `dtype_bytes` is the size of weights that are not quantised and of activations,
    kv_dtype_bytes that of KV (default: the same).

    A checkpoint with fp8 weights and activations is multiplied in fp8, other quantised ones in 16 bits. Raises
    ModelError where the parameters cannot be counted, the config does not say enough, or what it says cannot be.
    """
    try:
        return _read_work(config, dtype_bytes, kv_dtype_bytes or dtype_bytes, cache)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as problem:
        raise ModelError(f"config has a value that cannot be a size ({one_line(problem)})") from problem


def _read_work(config: Mapping[str, Any], dtype_bytes: int, kv_bytes: int, cache: ConfigCache | None) -> ModelFlops:
    fields = read_fields(config, cache)
    parameters, _ = parameters_of(config, fields, cache)
    hidden, vocab = fields.get("hidden_size", "n_embd", "d_model"), fields.get("vocab_size")
    if not parameters.total or not hidden or not vocab:
        named = fields.model_type or "a model without model_type"
        raise ModelError(f"{named} cannot be simulated: its parameters cannot be counted from its config")
    reader = ConfigReader(fields, dtype_bytes)
    groups = reader.geometry().groups
    layers = len(reader.layer_names())
    vectors = _HIDDEN_VECTORS * hidden + _INNER_VECTORS * inner_size(fields)
    count, chosen = _experts(fields) if parameters.experts else (0, 0)
    dense, experts = _matrices(parameters, fields, dtype_bytes)
    return ModelFlops(
        layers=layers,
        dense=dense,
        experts=experts,
        num_experts=count,
        experts_per_token=chosen,
        head=Matrices(hidden * vocab, hidden * vocab * dtype_bytes, "bf16"),
        vector_bytes=layers * vectors * dtype_bytes,
        state_bytes=2.0 * sum(group.layers * group.state_bytes for group in groups),
        attention=tuple(_attention(group, fields, reader, kv_bytes) for group in groups if group.kind != "state"),
        window=max((group.window for group in groups if group.window is not None), default=None),
    )


def _experts(fields: Fields) -> tuple[int, int]:
    """Routed experts of a layer, and how many of them a token goes through."""
    count = int(fields.get("num_local_experts", "num_experts", "n_routed_experts"))
    chosen = fields.get("num_experts_per_tok", "top_k_experts", "moe_topk")
    if chosen is None or not 1 <= int(chosen) <= count:
        raise ModelError(
            f"config sends a token through {chosen} of {count} experts; from 1 to all of them is understood"
        )
    return count, int(chosen)


def _matrices(parameters: Parameters, fields: Fields, dtype_bytes: int) -> tuple[Matrices, Matrices]:
    """Dense and routed matrices; routers, norms and biases go with the dense ones."""
    settings = fields.get("quantization_config")
    form = weight_format(settings) if isinstance(settings, Mapping) else None
    arithmetic: Arithmetic = "bf16"
    if isinstance(settings, Mapping) and _computes_fp8(settings):
        arithmetic = "fp8_block" if settings.get("weight_block_size") else "fp8"
    linear = dtype_bytes if form is None or form.linear is None else form.linear / 8
    expert = dtype_bytes if form is None or form.experts is None else form.experts / 8
    return (
        Matrices(parameters.linear, parameters.linear * linear + parameters.other * dtype_bytes, arithmetic),
        Matrices(parameters.experts, parameters.experts * expert, arithmetic),
    )


def _computes_fp8(settings: Mapping[str, Any]) -> bool:
    """Whether activations are quantised to 8 bits as well, so that the products run at that rate."""
    method = str(settings.get("quant_method", "")).lower()
    if method == "modelopt":
        return str(settings.get("quant_algo", "")).upper() == "FP8"
    if method == "compressed-tensors":
        groups: list[Mapping[str, Any]] = list((settings.get("config_groups") or {}).values())
        inputs = groups[0].get("input_activations") if groups else None
        return isinstance(inputs, Mapping) and inputs.get("num_bits") == 8
    return method in ("fp8", "fbgemm_fp8")


def _attention(group: LayerGroup, fields: Fields, reader: ConfigReader, kv_bytes: int) -> Attention:
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
