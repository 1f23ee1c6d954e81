"""KV memory that the layers of a model need for each token and each sequence.

Sources: Ainslie et al. 2023 (grouped-query attention), DeepSeek-V2 2024 (multi-head latent attention).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from llmsched.engine.architecture.config_fields import Fields, read_fields
from llmsched.engine.architecture.quantization import quantization_of
from llmsched.engine.architecture.recurrent import state_bytes
from llmsched.engine.errors import ModelError
from llmsched.kernels.latents import LatentWidths

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LayerKind = Literal["full", "window", "mla", "state"]
Confidence = Literal["exact", "estimate"]

_KINDS: Mapping[str, tuple[LayerKind, ...]] = {
    "full_attention": ("full",),
    "attention": ("full",),
    "indexed_attention": ("full",),
    "sliding_attention": ("window",),
    "window_attention": ("window",),
    "hybrid_sliding": ("window", "state"),
    "chunked_attention": ("window",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "mamba2": ("state",),
    "recurrent": ("state",),
    "conv": ("state",),
    "hybrid": ("full", "state"),
    "moe": (),
    "mlp": (),
    "no_op": (),
    "linear_map": (),
}
_PATTERN = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}

#: Families in which `sliding_window` applies to every layer if the config has no layer_types.
_WINDOW_EVERYWHERE = frozenset({"mistral", "mixtral", "phi3", "starcoder2", "ministral"})

#: Families in which hidden_size / heads is mostly a power of two, unless the config states another head_dim.
_MAY_STATE_HEAD_DIM = frozenset({"llama", "mistral", "mixtral", "granite"})

#: Names of settings that may change what layers cache.
_CACHES = re.compile(
    r"head|kv|layer|cach|state|window|att|latent|lora|index|recur|mamba|ssm|conv|rwkv|lru|swa|block|chunk|spars|"
    r"compress|memor|interval|pattern|period|lightning|share|cla_|pool|quant"
)
#: Names of settings that change only weights.
_NOT_CACHED = re.compile(
    r"^quantization_config$|expert|moe|mlp|ffn|vocab|sparse_step|first_k|q_lora_rank|bidirectional|^num_attention_heads|intermediate|dt_rank|mamba_d_ssm|^block_(auto|multiple|ffn|mlp|dim|ff|norm|use|out)|_bias$|expand|gate|"
    r"^share_input|mamba_(proj|hidden|act|ssm_dtype|ssm_cache_dtype)|time_step|dense_layers|^hidden_(size|act)"
)
#: Settings that change nothing if layers cache latent vectors (MLA), or if the config lists its layers.
_NOT_IN_MLA = frozenset({"num_key_value_heads", "head_dim", "qk_head_dim", "index_n_heads", "index_topk"})
_LISTED = frozenset(
    {"full_attention_interval", "sliding_window", "sliding_window_pattern", "max_window_layers", "use_sliding_window"}
    | {"attn_layer_period", "attn_layer_offset", "block_types", "num_hidden_layers", "full_attn_idxs"}
)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one model that need the same KV memory. `kind` says what a layer keeps:

    - "full": the KV of every token.
    - "window": the KV of the last `window` tokens.
    - "mla": one latent vector of `head_dim_k` numbers (kv_lora_rank + qk_rope_head_dim) for every token, and no values.
    - "state": recurrent state of `state_bytes` bytes per sequence.
    """

    kind: LayerKind
    layers: int
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int | None = None
    state_bytes: int = 0
    latent: LatentWidths | None = None  # in "mla" layers
    #: Width of the key that sparse attention (DeepSeek-V3.2) caches per token besides the latent vector.
    index_dim: int = 0

    @property
    def kv_widths(self) -> tuple[int, int]:
        """Number of key elements and number of value elements per token and layer."""
        return self.kv_heads * self.head_dim_k, self.kv_heads * self.head_dim_v

    def bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the KV bytes per token in all layers of the group, 0 for recurrent state."""
        numbers = self.kv_heads * (self.head_dim_k + self.head_dim_v) + self.index_dim
        return self.layers * numbers * dtype_bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    groups: tuple[LayerGroup, ...]
    confidence: Confidence  # "estimate" if `notes` contains an assumption
    notes: tuple[str, ...]

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the KV bytes per token in all layers without a sliding window."""
        return sum(g.bytes_per_token(dtype_bytes) for g in self.groups if g.kind in ("full", "mla"))

    def kv_bytes_per_token_window(self, dtype_bytes: int) -> int:
        """Return the KV bytes per token in all layers with a sliding window."""
        return sum(g.bytes_per_token(dtype_bytes) for g in self.groups if g.kind == "window")

    def bytes_per_token(self, dtype_bytes: int) -> int:
        return sum(g.bytes_per_token(dtype_bytes) for g in self.groups)

    def bytes_with_windows_freed(self, length: int, dtype_bytes: int) -> int:
        """Return the bytes of KV and state of a sequence of `length` tokens, if KV outside sliding windows is freed."""
        tokens = ((group, min(length, group.window or length)) for group in self.groups)
        return sum(count * group.bytes_per_token(dtype_bytes) for group, count in tokens) + self.state_bytes_per_seq

    @property
    def caches_kv(self) -> bool:
        return any(group.kind != "state" for group in self.groups)

    @property
    def window(self) -> int | None:
        """Largest sliding window in tokens, or None if no layer has a sliding window."""
        return max((g.window for g in self.groups if g.window is not None), default=None)

    @property
    def state_bytes_per_seq(self) -> int:
        return sum(g.layers * g.state_bytes for g in self.groups)


def kv_geometry(config: PretrainedConfig | Mapping[str, Any] | Fields, dtype_bytes: int = 2) -> Geometry:
    """Group the layers of a model by the KV memory that they need.

    `dtype_bytes` is the bytes of one number in the model's type. Raises ModelError for an encoder-decoder, and for a
    config whose layers or heads are missing or inconsistent.
    """
    fields = config if isinstance(config, Fields) else read_fields(config)
    return LayerReader(fields.reread(), dtype_bytes).geometry()


class LayerReader:
    """Reader of the layers in a config. Its methods raise ModelError if the config is invalid."""

    def __init__(self, fields: Fields, dtype_bytes: int = 2) -> None:
        self.fields = fields
        self.dtype_bytes = dtype_bytes
        self.assumed: list[str] = []  # sentences about assumptions
        self.facts: list[str] = []  # sentences about facts that users should know

    def geometry(self) -> Geometry:
        if not self.fields.known:
            model_type = self.fields.model_type or "not given"
            self.assumed.append(f"model_type is {model_type}: defaults of settings that the config omits are unknown")
        counted: Counter[LayerGroup] = Counter()
        kinds = [self.kinds(name) for name in self.layer_names()]
        if sharing := self.fields.get("num_kv_shared_layers", default=0):
            if not 0 < sharing < len(kinds):
                raise ModelError(f"config has num_kv_shared_layers {sharing}; it must be less than {len(kinds)} layers")
            self.facts.append(f"the last {sharing} of {len(kinds)} layers use the KV of earlier ones")
        for layer, cached in enumerate(kinds[: len(kinds) - sharing]):
            counted.update(self._one_layer(kind, layer) for kind in cached)
        form = quantization_of(self.fields.reread())
        self.assumed += self.fields.assumed()
        irrelevant = {name for name in self.fields.stated if _NOT_CACHED.search(name)}
        irrelevant |= _NOT_IN_MLA if self.fields.get("kv_lora_rank") else set()
        irrelevant |= {"num_key_value_heads"} if self.fields.get("multi_query") else set()
        irrelevant |= _LISTED if self.fields.get("layer_types", "hybrid_override_pattern") else set()
        self.assumed += self.fields.unread(_CACHES, irrelevant)
        if form is not None and form.kv_doubt is not None:
            self.assumed.append(form.kv_doubt)
        groups = tuple(replace(group, layers=count) for group, count in counted.items())
        notes = tuple(dict.fromkeys(self.assumed + self.facts))
        return Geometry(groups, "estimate" if self.assumed else "exact", notes)

    def layer_names(self) -> list[str]:
        """Return the type of each layer as config.json calls it, such as "full_attention" or "mamba"."""
        fields = self.fields
        layers, listed, name = fields.get("num_hidden_layers"), fields.get("layer_types"), "layer_types"
        if listed is None and (pattern := fields.get("hybrid_override_pattern")):
            listed, name = [_PATTERN.get(letter, letter) for letter in pattern], "hybrid_override_pattern"
        if listed:
            if isinstance(layers, int) and layers != len(listed):
                contradiction = f"num_hidden_layers is {layers}, but {name} lists {len(listed)}"
                if fields.known:
                    raise ModelError(f"config contradicts itself: {contradiction}")
                self.assumed.append(f"{contradiction}: {name} is used")
            return [str(name) for name in listed]
        if not isinstance(layers, int) or layers < 1:
            raise ModelError(
                f"config has no layers (num_hidden_layers is {layers!r}): it does not describe a language model"
            )
        cycle = self._cycle(layers)
        return [cycle[layer % len(cycle)] for layer in range(layers)]

    def _cycle(self, layers: int) -> Sequence[str]:
        """Return the types of the first few layers. The types of all other layers repeat this list."""
        fields, get = self.fields, self.fields.get
        if interval := get("full_attention_interval"):
            return [*["linear_attention"] * (interval - 1), "full_attention"]
        if cycle := get("block_types"):
            return [str(name) for name in cycle]
        if attention_at := get("attn_layer_indices", "full_attn_idxs"):
            return ["attention" if layer in attention_at else "mamba" for layer in range(layers)]
        if period := get("attn_layer_period"):
            offset = get("attn_layer_offset", default=0)
            return ["attention" if layer == offset else "mamba" for layer in range(period)]
        if any(name in fields.model_type for name in ("rwkv", "xlstm")):
            raise ModelError(f"{fields.model_type} is a recurrent model whose state is not known: it cannot be planned")
        if fields.model_type == "falcon_h1":
            return ["hybrid"]
        window = get("attention_window_size", "sliding_window")
        used, first = get("use_sliding_window"), get("max_window_layers")
        if not window or used is False:
            return ["full_attention"]
        if used and isinstance(first, int):
            return ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
        if pattern := get("sliding_window_pattern"):
            if not isinstance(pattern, int):
                raise ModelError(f"config has sliding_window_pattern {pattern!r}; it must be a number of layers")
            return [*["sliding_attention"] * (pattern - 1), "full_attention"]
        if fields.model_type in _WINDOW_EVERYWHERE:
            return ["sliding_attention"]
        self.assumed.append(f"sliding_window {window} without layer_types: all layers are counted as full attention")
        return ["full_attention"]

    def kinds(self, name: str) -> tuple[LayerKind, ...]:
        """Return the kinds of KV memory that a layer of type `name` needs; () if it needs none."""
        if name not in _KINDS:
            self.assumed.append(f"layers of the unknown type {name!r} are counted as full attention")
            return ("full",)
        if self.fields.get("attention_window_size") and name == "attention":
            return ("window",)
        return _KINDS[name]

    def _one_layer(self, kind: LayerKind, layer: int) -> LayerGroup:
        get = self.fields.get
        if kind == "state":
            size = state_bytes(self.fields, self.dtype_bytes)
            if size is None:
                self.assumed.append("the recurrent state of some layers is of an unknown kind and is not counted")
            return LayerGroup("state", 1, state_bytes=size or 0)
        if kind == "full" and (latent := get("kv_lora_rank")):
            if (rope := get("qk_rope_head_dim")) is None:
                raise ModelError("config has kv_lora_rank (MLA) but no qk_rope_head_dim")
            key, index = get("qk_nope_head_dim", default=0), get("index_head_dim", default=0)
            if self._own("indexer_types", kind, layer) == "shared":  # this layer uses the keys of an earlier one
                index = 0
            widths = LatentWidths(latent, rope, key, get("v_head_dim", default=key + rope))
            return LayerGroup("mla", 1, 1, latent + rope, latent=widths, index_dim=index)
        kv_heads, head_dim = self.kv_heads(kind, layer), self.head_dim(kind, layer)
        head_dim_v = self._own("v_head_dim", kind, layer) or head_dim
        if min(kv_heads, head_dim, head_dim_v) < 1:
            raise ModelError(
                f"config has layers of {kv_heads} KV heads with keys of {head_dim} and values of {head_dim_v} numbers; "
                "each must be 1 or more"
            )
        heads = self.fields.values.get("num_attention_heads")
        if kind == "full" and isinstance(heads, int) and heads % kv_heads:
            raise ModelError(f"config has {heads} attention heads, which is not a multiple of its {kv_heads} KV heads")
        names = ("attention_window_size", "sliding_window", "attention_chunk_size", "sliding_window_size")
        window = next((size for name in names if (size := self._own(name, kind, layer))), None)
        window = window if kind == "window" else None
        if kind == "window" and not isinstance(window, int):
            raise ModelError(f"config has layers with a window, but sliding_window is {window!r}")
        return LayerGroup(kind, 1, kv_heads, head_dim, head_dim_v, window)

    def heads(self, kind: LayerKind = "full", layer: int | None = None) -> int:
        """Return the number of query heads of one layer. By default, return the largest number in any layer."""
        heads = self._own("num_attention_heads", kind, layer or 0)
        if layer is None and isinstance(listed := self.fields.get("num_attention_heads"), list):
            heads = max(listed)
        if not isinstance(heads, int) or heads < 1:
            raise ModelError(f"config has no attention heads (num_attention_heads is {heads!r})")
        return heads

    def kv_heads(self, kind: LayerKind, layer: int) -> int:
        fields = self.fields
        if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
            return 1
        if fields.model_type == "falcon" and not fields.get("new_decoder_architecture"):
            return self.heads()
        if kind == "full" and fields.get("attention_k_eq_v") and fields.get("num_global_key_value_heads"):
            return int(fields.get("num_global_key_value_heads"))
        given = self._own("num_key_value_heads", kind, layer)
        given = given if given is not None else fields.get("attn_config", default={}).get("kv_n_heads")
        if given is None:
            if not fields.known:
                self.assumed.append("num_key_value_heads is not given: one KV head per attention head is assumed")
            return self.heads(kind, layer)
        return int(given)

    def head_dim(self, kind: LayerKind, layer: int) -> int:
        fields = self.fields
        if kind == "full" and fields.get("global_head_dim"):
            return int(fields.get("global_head_dim"))
        if given := self._own("head_dim", kind, layer):
            return int(given)
        hidden, heads = fields.get("hidden_size"), self.heads(kind, layer)
        if not isinstance(hidden, int):
            raise ModelError("config has neither head_dim nor hidden_size")
        if hidden % heads:
            raise ModelError(f"config has no head_dim, and hidden_size {hidden} does not divide into {heads} heads")
        width = hidden // heads
        if fields.model_type in _MAY_STATE_HEAD_DIM and width & (width - 1):
            self.assumed.append(f"the config does not state head_dim; {hidden} / {heads} = {width} is assumed")
        return width

    def _own(self, name: str, kind: LayerKind, layer: int) -> Any:
        """Return the value of a setting for one layer."""
        value = self.fields.get(f"swa_{name}") if kind == "window" else None
        value = self.fields.get(name) if value is None else value
        overrides = self.fields.get("per_layer_config")
        if isinstance(overrides, Mapping):
            value = {int(key): own for key, own in overrides.items()}.get(layer, {}).get(name, value)
        if not isinstance(value, list):
            return value
        if len(value) != (layers := len(self.layer_names())):
            raise ModelError(f"config has {len(value)} values of {name} for {layers} layers")
        return value[layer]
