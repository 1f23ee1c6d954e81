"""Conversion of a config's settings to standard names and forms.

A setting that differs between layers becomes a list with one value for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsched.engine.errors import ModelError

#: Other names of each setting. If a config has several of them, the standard name counts, or else the first other name.
_OTHER_NAMES: Mapping[str, str] = {
    "num_hidden_layers": "n_layer n_layers num_layers num_transformer_layers",
    "hidden_size": "n_embd n_embed d_model model_dim",
    "num_attention_heads": "n_head n_heads num_heads num_query_heads",
    "num_key_value_heads": "num_kv_heads n_kv_heads multi_query_group_num",
    "head_dim": "attention_head_dim kv_channels",
    "intermediate_size": "n_inner ffn_dim ffn_hidden_size",
    "max_position_embeddings": "n_positions max_seq_len max_sequence_length seq_length max_context_length",
    "layer_types": "layers_block_type",
    "block_types": "_block_types",
    "sliding_window_pattern": "_sliding_window_pattern",
    "num_experts": "num_local_experts n_routed_experts moe_num_experts",
    "num_experts_per_tok": "num_experts_per_token experts_per_token top_k_experts moe_topk",
    "n_shared_experts": "num_shared_experts",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "tie_word_embeddings": "share_input_output_layers",
    "quantization_config": "compression_config",
}
STANDARD_NAMES: Mapping[str, str] = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}

#: Settings of models whose layers are all recurrent, under the names that hybrid models use.
_PURE_STATE: dict[str, Mapping[str, str]] = {
    "mamba": {
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "intermediate_size": "mamba_intermediate_size",
    },
    "mamba2": {"num_attention_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state_size": "ssm_state_size"},
}
_PURE_STATE["falcon_mamba"] = _PURE_STATE["mamba"]

#: Settings of an attention layer in block_configs that `_from_blocks` reads.
_BLOCK_READ = frozenset({"no_op", "n_heads_in_group", "num_key_value_heads", "replace_with_linear", "window_length"})
#: Settings of an MLP in block_configs that may change its weights but are not read.
_MLP_UNREAD = frozenset({"replace_with_linear", "sparsify", "moe"})


def standardise(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not null, under standard names.

    Raises ModelError for a linear_attn_config that does not name each layer exactly once.
    """
    values = {name: value for name, value in stated.items() if value is not None}
    for other, name in STANDARD_NAMES.items():
        if other in values and values.get(name, values[other]) == values[other]:
            values[name] = values.pop(other)
    if (each := values.pop("num_key_value_heads_per_layer", None)) is not None:
        values["num_key_value_heads"] = each
    for spelling, rewrite in _REWRITES.items():
        if spelling in values:
            values |= rewrite(values, values.pop(spelling))
    if str(values.get("model_type")).startswith("longcat") and "num_layers" in stated:
        values["num_hidden_layers"] = 2 * int(values["num_hidden_layers"])  # each layer has two attentions
    if (renamed := _PURE_STATE.get(str(values.get("model_type")))) and "layer_types" not in values:
        values = {renamed.get(name, name): value for name, value in values.items()}
        values["layer_types"] = ["mamba"] * int(values.get("num_hidden_layers", 0))
    return values


def _from_blocks(values: Mapping[str, Any], blocks: Any) -> dict[str, Any]:
    """Return the settings of block_configs (Nemotron-NAS), which describes attention and MLP of each layer."""
    attention, mlps = ([dict(block[part]) for block in blocks] for part in ("attention", "ffn"))
    heads, hidden = values.get("num_attention_heads", 0), values.get("hidden_size", 0)
    found: dict[str, Any] = {"layer_types": [], "num_key_value_heads": [], "sliding_window": []}
    for each in attention:
        group = each.get("n_heads_in_group")
        cached = not (each.get("no_op") or each.get("replace_with_linear"))
        kind = "sliding_attention" if each.get("window_length") else "full_attention"
        found["layer_types"].append(kind if cached else "linear_map" if each.get("replace_with_linear") else "no_op")
        found["num_key_value_heads"].append(each.get("num_key_value_heads") or (heads // group if group else 0))
        found["sliding_window"].append(each.get("window_length"))
    found["intermediate_size"] = [_block_width(each, hidden) for each in mlps]
    others = {name for each in attention for name, value in each.items() if value and name not in _BLOCK_READ}
    others |= {f"ffn_{name}" for each in mlps for name, value in each.items() if value and name in _MLP_UNREAD}
    return found | {f"block_configs.{name}": True for name in others}


def _block_width(mlp: Mapping[str, Any], hidden: int) -> int:
    if mlp.get("no_op"):
        return 0
    if mlp.get("intermediate_size"):
        return int(mlp["intermediate_size"])
    return -(-int(2 * mlp["ffn_mult"] * hidden / 3) // 256) * 256


def _from_multipliers(values: dict[str, Any], multipliers: Any) -> dict[str, Any]:
    """Return the widths of MLPs from ffn_multipliers (OpenELM), which has a multiple of hidden_size for each layer."""
    values.pop("qkv_multipliers", None)  # the numbers of heads follow from them
    divisor, widths = int(values.pop("ffn_dim_divisor", 1)), []
    for multiplier in multipliers:
        exact = multiplier * values["hidden_size"]
        width = max(divisor, int(exact + divisor / 2) // divisor * divisor)
        widths.append(width + divisor if width < 0.9 * exact else width)
    return {"intermediate_size": widths}


def _from_linear_attention(values: Mapping[str, Any], described: Any) -> dict[str, Any]:
    """Return layer types and head sizes from linear_attn_config (Kimi Linear), which gives layer numbers by type."""
    full, delta = (set(described.get(name, ())) for name in ("full_attn_layers", "kda_layers"))
    layers = range(1, int(values.get("num_hidden_layers", 0)) + 1)
    if full & delta or full | delta != set(layers):
        raise ModelError(
            f"config has linear_attn_config with {len(full)} full_attn_layers and {len(delta)} kda_layers; together "
            f"they must name each of the {len(layers)} layers once"
        )
    return {
        "layer_types": ["full_attention" if layer in full else "linear_attention" for layer in layers],
        **_equal_heads({"linear_head_dim": described["head_dim"]}, described["num_heads"]),
        "linear_conv_kernel_dim": described["short_conv_kernel_size"],
    }


def _equal_heads(values: Mapping[str, Any], heads: Any) -> dict[str, Any]:
    """Return head sizes from linear_num_heads and linear_head_dim, which are those of queries, keys and values."""
    width = values.get("linear_head_dim")
    return {
        **{"linear_num_value_heads": heads, "linear_num_key_heads": heads},
        **{"linear_key_head_dim": width, "linear_value_head_dim": width},
    }


def _from_pattern(values: Mapping[str, Any], pattern: Any) -> dict[str, Any]:
    """Return layer types from hybrid_layer_pattern (MiMo): 1 is a layer with a sliding window, 0 a layer without."""
    return {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}


_REWRITES = {
    "block_configs": _from_blocks,
    "ffn_multipliers": _from_multipliers,
    "linear_num_heads": _equal_heads,
    "linear_attn_config": _from_linear_attention,
    "hybrid_layer_pattern": _from_pattern,
}
