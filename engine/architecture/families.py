"""Model families: the parts of their decoder layers, and default values of settings that config.json may omit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

#: True, False, or the name of the config's setting that holds the value.
Switch = bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Parts of a decoder that differ between model families."""

    qkv_bias: Switch = False
    out_bias: Switch = False
    qk_norm: Literal["head", "all", ""] = ""  # normalises queries and keys within each head, or over all heads together
    gated_query: bool = False  # doubles the rows of the query projection; the added rows gate the output of attention
    sinks: bool = False
    gated_mlp: bool = True
    mlp_bias: Switch = False
    experts: Literal["intermediate_size", "moe_intermediate_size", ""] = ""  # setting for the width of routed experts
    expert_bias: bool = False
    shared_gate: bool = False
    norms: int = 2  # per layer
    norm_vectors: int = 1  # weight vectors per norm: 2 for LayerNorm with bias
    positions: bool = False  # learned position embeddings
    head_bias: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same model_type."""

    parts: FamilyTraits
    needs: frozenset[str]  # settings that every published config.json of the family has
    defaults: Mapping[str, Any]  # values of settings that published files leave out


def _biased(switch: Switch, **parts: Any) -> FamilyTraits:
    return FamilyTraits(qkv_bias=switch, out_bias=switch, mlp_bias=switch, **parts)


def _family(parts: FamilyTraits, needs: str, **defaults: Any) -> Family:
    sizes = "num_hidden_layers hidden_size num_attention_heads vocab_size max_position_embeddings tie_word_embeddings"
    return Family(parts, frozenset(f"{sizes} {needs}".split()) - defaults.keys(), defaults)


_GROUPED = "intermediate_size num_key_value_heads"
_WIDE = f"{_GROUPED} head_dim"
_LOCAL = "num_local_experts num_experts_per_tok"
_EXPERTS = "num_experts num_experts_per_tok moe_intermediate_size"
_SHARED = f"{_EXPERTS} shared_expert_intermediate_size"
_DELTA = "linear_num_value_heads linear_num_key_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"
_MLA = "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
_ROUTED = "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace"
_MLA_MOE = f"intermediate_size {_MLA} {_ROUTED}"
_MAMBA = "mamba_num_heads mamba_head_dim ssm_state_size n_groups conv_kernel use_conv_bias hybrid_override_pattern"
_GEMMA4 = "layer_types sliding_window attention_k_eq_v num_kv_shared_layers enable_moe_block"

_BARE = FamilyTraits()
_GEMMA = FamilyTraits(qkv_bias="attention_bias", out_bias="attention_bias")
_COHERE = replace(_GEMMA, norms=1)
_LLAMA = replace(_GEMMA, mlp_bias="mlp_bias")
_QWEN2 = FamilyTraits(qkv_bias=True)
_QWEN2_MOE = replace(_QWEN2, experts="moe_intermediate_size", shared_gate=True)
_GLM = FamilyTraits(qkv_bias="attention_bias")
_QWEN3 = replace(_GEMMA, qk_norm="head")
_NEXT = replace(_QWEN3, gated_query=True)
_QWEN3_MOE = replace(_QWEN3, experts="moe_intermediate_size")
_NEXT_MOE = replace(_NEXT, experts="moe_intermediate_size", shared_gate=True)
_MIXTRAL = FamilyTraits(experts="intermediate_size")
_DEEPSEEK = FamilyTraits(experts="moe_intermediate_size")
_GPT = _biased(True, gated_mlp=False, norm_vectors=2)

_GPT2 = replace(_GPT, positions=True)

FAMILIES: Mapping[str, Family] = {
    "llama": _family(_LLAMA, _GROUPED),
    "granite": _family(_LLAMA, _GROUPED),
    "smollm3": _family(_LLAMA, _GROUPED, tie_word_embeddings=True),
    "mistral": _family(_BARE, f"{_GROUPED} sliding_window"),
    "phi3": _family(_BARE, f"{_GROUPED} sliding_window"),
    "glm4": _family(replace(_GLM, norms=4), f"{_WIDE} attention_bias"),
    "olmo2": _family(replace(_GEMMA, qk_norm="all"), _GROUPED),
    "olmo": _family(replace(_GEMMA, norm_vectors=0), _GROUPED),
    "olmo3": _family(replace(_GEMMA, qk_norm="all"), f"{_GROUPED} sliding_window", sliding_window_pattern=4),
    "glm": _family(_GLM, f"{_WIDE} attention_bias"),
    "seed_oss": _family(replace(_LLAMA, out_bias="attention_out_bias"), f"{_WIDE} attention_bias attention_out_bias"),
    "ernie4_5": _family(_biased("use_bias"), f"{_WIDE} use_bias", tie_word_embeddings=True),
    "exaone4": _family(replace(_BARE, qk_norm="head"), f"{_GROUPED} layer_types sliding_window"),
    "stablelm": _family(
        FamilyTraits(qkv_bias="use_qkv_bias", norm_vectors=2),
        f"{_GROUPED} use_qkv_bias use_parallel_residual qk_layernorm",
    ),
    "qwen2": _family(_QWEN2, _GROUPED),
    "qwen3": _family(_QWEN3, _WIDE),
    "qwen2_vl": _family(_QWEN2, _GROUPED),
    "qwen2_5_vl": _family(_QWEN2, _GROUPED),
    "qwen2_5_vl_text": _family(_QWEN2, _GROUPED),
    "qwen3_vl_text": _family(_QWEN3, _WIDE),
    "qwen3_5_text": _family(_NEXT, f"{_WIDE} {_DELTA} layer_types mamba_ssm_dtype"),
    "gemma": _family(_GEMMA, _WIDE, tie_word_embeddings=True),
    "gemma2": _family(
        replace(_GEMMA, norms=4), f"{_WIDE} sliding_window", sliding_window_pattern=2, tie_word_embeddings=True
    ),
    "gemma3_text": _family(
        replace(_QWEN3, norms=4),
        f"{_WIDE} sliding_window",
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=262208,
        max_position_embeddings=131072,
        sliding_window_pattern=6,
        tie_word_embeddings=True,
    ),
    "gemma4_text": _family(
        FamilyTraits(qk_norm="head", norms=4),
        f"{_WIDE} {_GEMMA4} global_head_dim num_global_key_value_heads hidden_size_per_layer_input",
        tie_word_embeddings=True,
    ),
    "cohere": _family(replace(_COHERE, qk_norm="all"), _GROUPED, use_qk_norm=False, tie_word_embeddings=True),
    "cohere2": _family(_COHERE, f"{_WIDE} sliding_window", sliding_window_pattern=4, tie_word_embeddings=True),
    "mixtral": _family(_MIXTRAL, f"{_GROUPED} {_LOCAL}"),
    "olmoe": _family(
        replace(_GEMMA, qk_norm="all", experts="intermediate_size"),
        f"{_GROUPED} num_experts num_experts_per_tok",
    ),
    "granitemoe": _family(replace(_GEMMA, experts="intermediate_size"), f"{_GROUPED} {_LOCAL}"),
    "minimax_m2": _family(replace(_MIXTRAL, qk_norm="all"), f"{_WIDE} {_LOCAL}"),
    "qwen2_moe": _family(_QWEN2_MOE, f"{_GROUPED} {_SHARED} decoder_sparse_step"),
    "qwen3_moe": _family(_QWEN3_MOE, f"{_WIDE} {_EXPERTS} decoder_sparse_step"),
    "qwen3_vl_moe_text": _family(_QWEN3_MOE, f"{_WIDE} {_EXPERTS} decoder_sparse_step", tie_word_embeddings=True),
    "qwen3_next": _family(_NEXT_MOE, f"{_WIDE} {_SHARED} {_DELTA}", full_attention_interval=4),
    "qwen3_5_moe_text": _family(
        _NEXT_MOE, f"num_key_value_heads head_dim {_SHARED} {_DELTA} layer_types mamba_ssm_dtype"
    ),
    "gpt_oss": _family(
        replace(_GEMMA, sinks=True, experts="intermediate_size", expert_bias=True),
        f"{_WIDE} {_LOCAL} sliding_window layer_types attention_bias quantization_config",
    ),
    "deepseek_v2": _family(_DEEPSEEK, _MLA_MOE),
    "glm4_moe_lite": _family(_DEEPSEEK, _MLA_MOE),
    "deepseek_v3": _family(_DEEPSEEK, f"{_MLA_MOE} quantization_config"),
    "deepseek_v32": _family(_DEEPSEEK, f"{_MLA_MOE} index_head_dim index_n_heads index_topk quantization_config"),
    "nemotron-nas": _family(_LLAMA, "block_configs"),
    "openelm": _family(
        replace(_BARE, qk_norm="head"),
        "num_key_value_heads head_dim ffn_multipliers ffn_dim_divisor normalize_qk_projections",
    ),
    "glm4_moe": _family(
        replace(_GLM, qk_norm="head", experts="moe_intermediate_size"),
        f"{_WIDE} attention_bias use_qk_norm {_ROUTED}",
    ),
    "nemotron_h": _family(
        FamilyTraits(gated_mlp=False, norms=1, experts="moe_intermediate_size"),
        f"{_WIDE} {_MAMBA} moe_shared_expert_intermediate_size",
    ),
    "phi": _family(replace(_GPT, norms=1, head_bias=True), _GROUPED),
    "starcoder2": _family(
        _biased("use_bias", gated_mlp=False, norm_vectors=2), f"{_GROUPED} use_bias", tie_word_embeddings=True
    ),
    "gpt_neox": _family(
        replace(_GPT, qkv_bias="attention_bias", out_bias="attention_bias"), "intermediate_size", attention_bias=True
    ),
    "gpt2": _family(_GPT2, "", tie_word_embeddings=True),
    "gpt_bigcode": _family(_GPT2, "multi_query", tie_word_embeddings=True),
    "opt": _family(_GPT2, "ffn_dim word_embed_proj_dim do_layer_norm_before", tie_word_embeddings=True),
    "falcon": _family(
        _biased("bias", gated_mlp=False, norms=1, norm_vectors=2),
        "multi_query new_decoder_architecture parallel_attn bias alibi",
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
}
