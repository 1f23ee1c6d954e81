"""Counts of a model's parameters, computed from its config for the families in families.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llmsched.engine.architecture.families import FAMILIES, DecoderParts, Switch
from llmsched.engine.architecture.fields import Fields
from llmsched.engine.architecture.geometry import LayerReader
from llmsched.engine.architecture.recurrent import DeltaNetSizes, Mamba2Sizes


class Parameters(NamedTuple):
    """Numbers of parameters in classes that quantised formats treat differently.

    - embeddings: input embeddings, output embeddings and learned positions
    - other: norms, biases, routers, convolutions
    - encoders: image and audio encoders
    """

    linear: int = 0
    experts: int = 0
    embeddings: int = 0
    other: int = 0
    encoders: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def add_up(parts: Iterable[Parameters]) -> Parameters:
    """Return the sum of all parts, class by class."""
    return Parameters(*map(sum, zip(*parts, strict=True)))


def count_parameters(config: Fields) -> Parameters | None:
    """Count the language model's parameters; None for a family or variant that families.py does not describe.

    Raises ModelError if the config does not describe all layers.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or not config.hidden_size or not config.vocab_size or _is_variant(config):
        return None
    return add_up(_Counter(config, family.parts).count())


def _is_variant(config: Fields) -> bool:
    """Return True if the config's settings add parts that _Counter does not count."""
    usual = {"falcon": "parallel_attn", "opt": "do_layer_norm_before"}.get(config.model_type)
    if usual is not None and not config.get(usual):
        return True
    unusual = {
        "nemotron_h": ("use_bias", "mlp_bias", "mamba_proj_bias"),
        "stablelm": ("use_parallel_residual",),
        "falcon": ("new_decoder_architecture",),
    }.get(config.model_type, ())
    unusual += ("hidden_size_per_layer_input", "num_kv_shared_layers", "moe_latent_size", "qk_layernorm")
    projected = config.get("word_embed_proj_dim", default=config.hidden_size)
    return projected != config.hidden_size or any(config.get(name) for name in unusual)


class _Counter:
    """Counter of the parameters of one language model."""

    def __init__(self, config: Fields, parts: DecoderParts) -> None:
        self.config = config
        self.parts = parts
        self.hidden: int = config.hidden_size
        self.reader = LayerReader(config)

    def count(self) -> Iterator[Parameters]:
        """Yield the counts of the embeddings, of the parts of every layer, and of the last norm."""
        copies = 1 if self.config.get("tie_word_embeddings", default=False) else 2
        yield Parameters(embeddings=copies * self.config.vocab_size * self.hidden)
        if self.parts.head_bias:
            yield Parameters(other=self.config.vocab_size)
        if self.parts.positions:
            reserved = 2 if self.config.model_type == "opt" else 0
            yield Parameters(embeddings=(self.config.get(self.parts.positions) + reserved) * self.hidden)
        for layer, name in enumerate(self.reader.layer_names()):
            yield self._norms(self.parts.norms)
            if name in ("linear_attention", "mamba"):
                yield self._mamba2() if self.config.get("mamba_num_heads") else self._delta_net()
            elif name not in ("moe", "mlp"):
                yield self._mla() if self.config.get("kv_lora_rank") else self._attention(layer, name)
            if self.config.model_type != "nemotron_h" or name in ("moe", "mlp"):
                yield from self._mlps(layer, name)  # a layer of nemotron_h is a mixer or an MLP, never both
        yield self._norms(1)

    def _norms(self, count: int) -> Parameters:
        return Parameters(other=count * self.parts.norm_vectors * self.hidden)

    def _attention(self, layer: int, name: str) -> Parameters:
        """Count the projections of queries, keys, values and output, with the family's biases, norms and sinks."""
        [kind] = self.reader.kinds(name)
        heads, head_dim = self.reader.heads(), self.reader.head_dim(kind, layer)
        query, key = heads * head_dim, self.reader.kv_heads(kind, layer) * head_dim
        value = 0 if kind == "full" and self.config.get("attention_k_eq_v") else key
        rows = query * (2 if self.parts.gated_query else 1) + key + value
        other = (rows if self._on(self.parts.qkv_bias) else 0) + (self.hidden if self._on(self.parts.out_bias) else 0)
        if self.parts.qk_norm and self.config.get("use_qk_norm", default=True):
            other += 2 * head_dim if self.parts.qk_norm == "head" else query + key
        return Parameters(linear=self.hidden * (rows + query), other=other + (heads if self.parts.sinks else 0))

    def _mla(self) -> Parameters:
        """Count multi-head latent attention (DeepSeek-V2): low-rank projections of KV and, if configured, queries."""
        get, heads = self.config.get, self.reader.heads()
        latent, rope, plain = get("kv_lora_rank"), get("qk_rope_head_dim"), get("qk_nope_head_dim")
        value, narrow = get("v_head_dim"), get("q_lora_rank")
        query = heads * (plain + rope)
        linear = self.hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * self.hidden
        linear += narrow * (self.hidden + query) if narrow else self.hidden * query
        biases = (narrow or 0) + latent + rope + self.hidden if get("attention_bias") else 0
        return Parameters(linear=linear, other=latent + (narrow or 0) + biases)

    def _delta_net(self) -> Parameters:
        """Count a gated delta net: projections, two numbers per value head, a short convolution and a norm."""
        sizes = DeltaNetSizes.of(self.config)
        heads, value = sizes.value_heads, sizes.value_width
        linear = self.hidden * (sizes.channels + value + 2 * heads) + value * self.hidden
        return Parameters(linear=linear, other=sizes.channels * sizes.kernel + 2 * heads + value // heads)

    def _mamba2(self) -> Parameters:
        """Count a Mamba-2 mixer: two projections, a convolution over x, B and C, three numbers per head and a norm."""
        sizes = Mamba2Sizes.of(self.config)
        linear = self.hidden * (2 * sizes.width + sizes.channels + sizes.heads)
        taps = sizes.kernel + (1 if self.config.get("use_conv_bias") else 0)
        return Parameters(linear=linear, other=sizes.channels * taps + 3 * sizes.heads + sizes.width)

    def _mlps(self, layer: int, name: str) -> Iterator[Parameters]:
        """Yield the counts of a layer's dense MLP, or of its experts and their router."""
        get = self.config.get
        if self.config.model_type == "gemma4_text":  # a dense MLP and experts, which have separate norms and scales
            yield self._mlp(get("intermediate_size"))
            if get("enable_moe_block"):
                yield self._experts(get("num_experts"), get("moe_intermediate_size"))
                yield Parameters(other=self.hidden + get("num_experts"))
                yield self._norms(3)
        elif self._is_sparse(layer, name):
            yield self._experts(self.config.num_experts, get(self.parts.experts))
            shared = self.config.shared_expert_size  # width of the experts that process every token
            if shared is None:
                shared = get("n_shared_experts", default=0) * get("moe_intermediate_size", default=0)
            if shared:
                yield self._mlp(shared)
            if self.parts.shared_gate:
                yield Parameters(other=self.hidden)
        else:
            yield self._mlp(self.config.mlp_size)

    def _is_sparse(self, layer: int, name: str) -> bool:
        get = self.config.get
        if name in ("moe", "mlp"):
            return name == "moe"
        if not self.parts.experts:
            return False
        first, step = get("first_k_dense_replace", default=0), get("decoder_sparse_step", default=1)
        return layer >= first and layer not in get("mlp_only_layers", default=()) and (layer + 1) % step == 0

    def _mlp(self, inner: int) -> Parameters:
        matrices = 3 if self.parts.gated_mlp else 2
        bias = (matrices - 1) * inner + self.hidden if self._on(self.parts.mlp_bias) else 0
        return Parameters(linear=matrices * self.hidden * inner, other=bias)

    def _experts(self, count: int, inner: int) -> Parameters:
        matrices = 3 if self.parts.gated_mlp else 2
        biases = count * ((matrices - 1) * inner + self.hidden + 1) if self.parts.expert_bias else 0
        return Parameters(experts=count * matrices * self.hidden * inner, other=count * self.hidden + biases)

    def _on(self, switch: Switch) -> bool:
        return bool(self.config.get(switch)) if isinstance(switch, str) else switch
