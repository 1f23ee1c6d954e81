"""Counts of a model's parameters, computed from the config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llmsched.engine.architecture.config_fields import Fields
from llmsched.engine.architecture.families import FAMILIES, FamilyTraits, Switch
from llmsched.engine.architecture.geometry import LayerReader
from llmsched.engine.architecture.recurrent import recurrent_sizes
from llmsched.engine.errors import ModelError


class Parameters(NamedTuple):
    """Numbers of parameters, in classes that quantised formats store differently."""

    linear: int = 0  # matrices of attention and dense MLPs
    experts: int = 0  # matrices of routed experts
    embeddings: int = 0  # input embeddings, output embeddings and learned positions
    other: int = 0  # norms, biases, routers, convolutions
    encoders: int = 0  # image and audio encoders

    @property
    def total(self) -> int:
        return sum(self)


def add_up(parts: Iterable[Parameters]) -> Parameters:
    return Parameters(*map(sum, zip(*parts, strict=True)))


def count_parameters(config: Fields) -> dict[str, Parameters] | None:
    """Count the parameters of each module of the language model. Keys are names in checkpoints ("model.layers.0.mlp").

    All routed experts of a layer are counted under the name of the first expert. Returns None for an unknown model
    family. Raises ModelError if the config does not describe all layers.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or not config.get("hidden_size") or not config.get("vocab_size") or _is_variant(config):
        return None
    counted: dict[str, Parameters] = {}
    for name, parts in _Counter(config, family.parts).count():
        counted[name] = add_up((counted[name], parts)) if name in counted else parts
    return counted


def adapted_width(config: Fields) -> int | None:
    """Return the numbers of inputs and outputs of the linear layers of attention and dense MLPs, added up.

    These layers are what a LoRA adapter can change at most. Returns None for an unknown model family, and for latent
    attention.
    """
    counted = count_parameters(config)
    if counted is None or config.get("kv_lora_rank"):
        return None
    hidden: int = config.get("hidden_size")  # the inputs of a layer, or its outputs
    return sum(hidden + parts.linear // hidden for parts in counted.values() if parts.linear)


def _is_variant(config: Fields) -> bool:
    usual = {"falcon": "parallel_attn", "opt": "do_layer_norm_before"}.get(config.model_type)
    if usual is not None and not config.get(usual):
        return True
    unusual = {
        "nemotron_h": ("use_bias", "mlp_bias", "mamba_proj_bias"),
        "stablelm": ("use_parallel_residual",),
        "falcon": ("new_decoder_architecture",),
    }.get(config.model_type, ())
    unusual += ("hidden_size_per_layer_input", "num_kv_shared_layers", "moe_latent_size", "qk_layernorm")
    unusual += ("use_double_wide_mlp", "block_configs.ffn_replace_with_linear")
    projected = config.get("word_embed_proj_dim", default=config.get("hidden_size"))
    return projected != config.get("hidden_size") or any(config.get(name) for name in unusual)


#: Name of a module and its parameters.
_Module = tuple[str, Parameters]


class _Counter:
    def __init__(self, config: Fields, parts: FamilyTraits) -> None:
        self.config = config
        self.parts = parts
        self.hidden: int = config.get("hidden_size")
        self.reader = LayerReader(config)

    def count(self) -> Iterator[_Module]:
        copies = 1 if self.config.get("tie_word_embeddings", default=False) else 2
        embeddings, other = copies * self.config.get("vocab_size") * self.hidden, 0
        if self.parts.head_bias:
            other += self.config.get("vocab_size")
        if self.parts.positions:
            reserved = 2 if self.config.model_type == "opt" else 0
            embeddings += (self.config.get("max_position_embeddings") + reserved) * self.hidden
        yield "model", Parameters(embeddings=embeddings, other=other)
        for layer, name in enumerate(self.reader.layer_names()):
            yield from self._layer(layer, name)
        yield "model", self._norms(1)

    def _layer(self, layer: int, name: str) -> Iterator[_Module]:
        module, alone = f"model.layers.{layer}", self.config.model_type == "nemotron_h"
        missing = (name == "no_op") + (self._mlp_size(layer) == 0)
        yield module, self._norms(self.parts.norms - missing)
        if name in ("linear_attention", "mamba"):
            yield from self._recurrent(f"{module}.{'mixer' if alone else 'linear_attn'}")
        elif name == "linear_map":
            yield from _matrices(f"{module}.self_attn", linear_attn=self.hidden**2)
        elif name not in ("moe", "mlp", "no_op"):
            attention = f"{module}.{'mixer' if alone else 'self_attn'}"
            yield from (
                self._mla(attention) if self.config.get("kv_lora_rank") else self._attention(attention, layer, name)
            )
        if not alone or name in ("moe", "mlp"):  # a layer of nemotron_h is a mixer or an MLP, never both
            yield from self._mlps(f"{module}.{'mixer' if alone else 'mlp'}", layer, name)

    def _norms(self, count: int) -> Parameters:
        return Parameters(other=count * self.parts.norm_vectors * self.hidden)

    def _attention(self, module: str, layer: int, name: str) -> Iterator[_Module]:
        [kind] = self.reader.kinds(name)
        heads, head_dim = self.reader.heads(kind, layer), self.reader.head_dim(kind, layer)
        query, key = heads * head_dim, self.reader.kv_heads(kind, layer) * head_dim
        value = 0 if kind == "full" and self.config.get("attention_k_eq_v") else key
        gated = self.parts.gated_query and self.config.get("attn_output_gate", default=True)
        rows = query * (2 if gated else 1)
        other = (rows + key + value if self._on(self.parts.qkv_bias) else 0) + (heads if self.parts.sinks else 0)
        other += self.hidden if self._on(self.parts.out_bias) else 0
        if self.parts.qk_norm and self.config.get("use_qk_norm", "normalize_qk_projections", default=True):
            other += 2 * head_dim if self.parts.qk_norm == "head" else query + key
        sizes = {"q_proj": rows, "k_proj": key, "v_proj": value, "o_proj": query}
        yield from _matrices(module, **{name: self.hidden * size for name, size in sizes.items()})
        yield module, Parameters(other=other)

    def _mla(self, module: str) -> Iterator[_Module]:
        get, heads = self.config.get, self.reader.heads()
        latent, rope, plain = get("kv_lora_rank"), get("qk_rope_head_dim"), get("qk_nope_head_dim")
        value, narrow = get("v_head_dim"), get("q_lora_rank")
        query = heads * (plain + rope)
        yield from _matrices(
            module,
            kv_a_proj_with_mqa=self.hidden * (latent + rope),
            kv_b_proj=latent * heads * (plain + value),
            o_proj=heads * value * self.hidden,
            q_a_proj=self.hidden * (narrow or query),
            q_b_proj=(narrow or 0) * query,
        )
        if index := get("index_head_dim"):
            index_heads = get("index_n_heads")
            keys, weights = self.hidden * index, self.hidden * index_heads
            yield from _matrices(f"{module}.indexer", wq_b=(narrow or self.hidden) * index_heads * index, wk=keys)
            yield module, Parameters(other=weights + 2 * index)
        biases = (narrow or 0) + latent + rope + self.hidden if get("attention_bias") else 0
        yield module, Parameters(other=latent + (narrow or 0) + biases)

    def _recurrent(self, module: str) -> Iterator[_Module]:
        if (sizes := recurrent_sizes(self.config)) is None or not sizes.heads:
            raise ModelError("config has recurrent layers of a kind whose weights cannot be counted")
        width, heads, taps = sizes.width, sizes.heads, sizes.kernel
        if self.config.get("linear_num_value_heads"):
            projected, small = 2 * heads, 2 * heads + width // heads
        else:
            projected, small = heads, 3 * heads + width
            taps += 1 if self.config.get("use_conv_bias") else 0
        inputs = self.hidden * (sizes.channels + width + projected)
        yield from _matrices(module, in_proj=inputs, out_proj=width * self.hidden)
        yield module, Parameters(other=sizes.channels * taps + small)

    def _mlps(self, module: str, layer: int, name: str) -> Iterator[_Module]:
        get, size = self.config.get, self.config.size
        if self.config.model_type == "gemma4_text":  # a dense MLP and experts, which have separate norms and scales
            yield from self._mlp(module, size("intermediate_size"))
            if get("enable_moe_block"):
                yield from self._experts(module, size("num_experts"), size("moe_intermediate_size"))
                yield module, Parameters(other=self.hidden + size("num_experts"))
                yield module, self._norms(3)
        elif self._is_sparse(layer, name):
            yield from self._experts(module, size("num_experts"), size(self.parts.experts or "intermediate_size"))
            shared, count = self.config.get("shared_expert_intermediate_size"), get("n_shared_experts", default=0)
            if shared is None:  # the width of all experts together that every token is sent to
                shared = count * get("moe_intermediate_size", default=0)
            if shared:
                yield from self._mlp(f"{module}.shared_expert{'' if self.parts.shared_gate else 's'}", shared)
            if self.parts.shared_gate:
                yield module, Parameters(other=self.hidden)
        elif width := self._mlp_size(layer):
            yield from self._mlp(module, width)

    def _mlp_size(self, layer: int) -> int:
        size = self.config.mlp_size
        return int(size[layer] if isinstance(size, list) else size)

    def _is_sparse(self, layer: int, name: str) -> bool:
        get = self.config.get
        if name in ("moe", "mlp"):
            return name == "moe"
        if not self.parts.experts:
            return False
        if listed := get("mlp_layer_types"):
            return str(listed[layer]) == "sparse"
        first, step = get("first_k_dense_replace", default=0), get("decoder_sparse_step", default=1)
        every = get("moe_layer_freq", default=1)
        chosen = every[layer] if isinstance(every, list) else layer % every == 0
        return layer >= first and chosen and layer not in get("mlp_only_layers", default=()) and (layer + 1) % step == 0

    def _mlp(self, module: str, inner: int) -> Iterator[_Module]:
        yield from _matrices(module, **dict.fromkeys(self._mlp_names, self.hidden * inner))
        if self._on(self.parts.mlp_bias):
            yield module, Parameters(other=(len(self._mlp_names) - 1) * inner + self.hidden)

    def _experts(self, module: str, count: int, inner: int) -> Iterator[_Module]:
        for name in self._mlp_names:
            yield f"{module}.experts.0.{name}", Parameters(experts=count * self.hidden * inner)
        biases = count * ((len(self._mlp_names) - 1) * inner + self.hidden + 1) if self.parts.expert_bias else 0
        yield f"{module}.gate", Parameters(other=count * self.hidden + biases)

    @property
    def _mlp_names(self) -> tuple[str, ...]:
        gated = self.parts.gated_mlp and self.config.get("ffn_with_glu", default=True)
        return ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")

    def _on(self, switch: Switch) -> bool:
        return bool(self.config.get(switch)) if isinstance(switch, str) else switch


def _matrices(module: str, **sizes: int) -> Iterator[_Module]:
    for name, size in sizes.items():
        yield f"{module}.{name}", Parameters(linear=size)
