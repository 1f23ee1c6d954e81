"""Conversion of a GGUF file's metadata to a transformers config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llmsched.engine.errors import ModelError
from llmsched.engine.model.gguf_dequantize import dequantized
from llmsched.engine.model.gguf_file import GGUFFile
from llmsched.engine.model.support import DECODERS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Settings = dict[str, Any]

#: Supported rope scaling settings. A file with another one is refused, because ignoring it could change the output.
_SCALING_KEYS = frozenset(
    {"type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_log_multiplier"}
)
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
#: Model types whose name differs from that of the architecture.
_MODEL_TYPES = {
    **{"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"},
}
#: Value of expert_gating_func.
_SIGMOID = 2
#: Number of layers of the two Gemma models whose attention scale is not 1/sqrt(head_dim) (as in llama.cpp).
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def gguf_config(file: GGUFFile) -> PretrainedConfig:
    """Convert the metadata of a GGUF file to a transformers config. Raises ModelError for an unsupported file."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**gguf_settings(file))


def gguf_settings(file: GGUFFile) -> Settings:
    """Convert a GGUF file's metadata to the content of a config.json. Raises ModelError for an unsupported file."""
    heads, kv_heads = file.require("attention.head_count"), file.get("attention.head_count_kv")
    kv_heads = heads if kv_heads is None else kv_heads
    hidden, feed_forward = file.require("embedding_length"), file.require("feed_forward_length")
    if any(isinstance(value, list) for value in (heads, kv_heads, feed_forward)):
        raise ModelError(f"{file.path}: layers of different shapes are not supported in GGUF files")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: lacks token_embd.weight: it holds a vocabulary or an adapter, not a model")
    head_dim, latent = file.get("attention.key_length", hidden // heads), file.architecture == "deepseek2"
    if not latent and (value_dim := file.get("attention.value_length", head_dim)) != head_dim:
        raise ModelError(f"{file.path}: keys of {head_dim} and values of {value_dim} dimensions are not supported")
    experts, model_type = file.get("expert_count"), _model_type(file)
    token = file.metadata.get
    fields = {
        "model_type": model_type,
        "architectures": [DECODERS[model_type]],
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0]),
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": file.require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": file.require("rope.dimension_count") if latent else head_dim,
        "max_position_embeddings": file.require("context_length"),
        "rms_norm_eps": file.require("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": token("tokenizer.ggml.bos_token_id"),
        "eos_token_id": token("tokenizer.ggml.eos_token_id"),
        "pad_token_id": token("tokenizer.ggml.padding_token_id"),
    }
    fields["rope_parameters"] = _rope(file, fields)
    if experts:
        fields |= _experts(file, experts)
    if latent:
        fields |= _deepseek(file, model_type)
    elif file.architecture == "phi3":
        fields |= _phi3(file, fields)
    elif file.architecture in _GEMMA_27B_LAYERS:
        fields |= _gemma(file, fields)
    return fields


def _model_type(file: GGUFFile) -> str:
    if file.architecture == "llama" and file.get("expert_count"):
        return "mixtral"
    if file.architecture == "deepseek2":  # the routers of V2 and V3 have different functions; old files do not say
        return "deepseek_v3" if file.get("expert_gating_func") == _SIGMOID else "deepseek_v2"
    return _MODEL_TYPES.get(file.architecture, file.architecture)


def gguf_generation_config(file: GGUFFile) -> Settings:
    """Return the content of a generation_config.json: the ids of BOS, padding and all end tokens."""
    token = file.metadata.get
    ends = [token(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return {
        "bos_token_id": token("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": token("tokenizer.ggml.padding_token_id"),
    }


def _rope(file: GGUFFile, fields: Settings) -> Settings:
    prefix = f"{file.architecture}.rope.scaling."
    if unknown := {k for k in file.metadata if k.startswith(prefix) and k.removeprefix(prefix) not in _SCALING_KEYS}:
        raise ModelError(f"{file.path}: rope settings {', '.join(sorted(unknown))} are not supported")
    theta = float(file.get("rope.freq_base", 10000.0))
    kind = file.get("rope.scaling.type", "none")
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear"))
    if "rope_factors_long.weight" in file.tensors:
        original = file.require("rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "long_factor": dequantized(file, "rope_factors_long.weight").tolist(),
            "short_factor": dequantized(file, "rope_factors_short.weight").tolist(),
            "factor": fields["max_position_embeddings"] / original,
            "original_max_position_embeddings": original,
        }
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, fields, theta)
    if kind == "none" and "rope.scaling.type" not in file.metadata and factor not in (None, 0, 1):
        kind = "linear"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    rope = {"rope_type": kind, "rope_theta": theta}
    if (multiplier := file.get("rope.scaling.yarn_log_multiplier")) is not None:  # DeepSeek's files have a tenth of it
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{10 * multiplier:.6g}"))
    if kind == "yarn":
        rope |= {"truncate": False} if file.architecture == "gpt-oss" else {}
        rope["original_max_position_embeddings"] = file.require("rope.scaling.original_context_length")
    return {**rope, "factor": float(factor)}


def _llama3_rope(file: GGUFFile, fields: Settings, theta: float) -> Settings:
    """Recover the rope_parameters of Llama 3.1 from the file's table of frequency divisors."""
    divisors = dequantized(file, "rope_freqs.weight").astype(np.float64)
    factor = float(divisors.max())
    rotary = fields["head_dim"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotary, 2) / rotary)
    smooth = (_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    expected = 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(f"{file.path}: rope_freqs.weight differs from Llama 3.1's table; no other table is supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _experts(file: GGUFFile, count: int) -> Settings:
    """Return the settings of a mixture of experts. As in llama.cpp, the architecture decides how a router works."""
    settings: Settings = {"num_experts_per_tok": file.require("expert_used_count")}
    if file.architecture != "deepseek2":
        settings["num_local_experts" if file.architecture in ("llama", "gpt-oss") else "num_experts"] = count
    if file.architecture.startswith("qwen"):
        settings["moe_intermediate_size"] = file.require("expert_feed_forward_length")
        settings["norm_topk_prob"] = file.architecture == "qwen3moe"
    if file.architecture == "qwen2moe":
        settings["shared_expert_intermediate_size"] = file.require("expert_shared_feed_forward_length")
    if file.architecture == "gpt-oss":
        settings["sliding_window"] = file.require("attention.sliding_window")
    return settings


def _deepseek(file: GGUFFile, model_type: str) -> Settings:
    """Return the settings of latent attention and experts that DeepSeek V2 and V3 need."""
    rope, groups = file.require("rope.dimension_count"), file.get("expert_group_count", 1)
    normalised = bool(file.get("expert_weights_norm"))
    if model_type == "deepseek_v2" and normalised:
        raise ModelError(f"{file.path}: normalised weights of experts that a softmax chooses are not supported")
    key = file.get("attention.key_length_mla", file.require("attention.key_length"))
    settings: Settings = {
        "num_key_value_heads": file.require("attention.head_count"),
        "kv_lora_rank": file.require("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": file.get("attention.value_length_mla", file.require("attention.value_length")),
        "n_routed_experts": file.require("expert_count"),
        "n_shared_experts": file.require("expert_shared_count"),
        "moe_intermediate_size": file.require("expert_feed_forward_length"),
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "routed_scaling_factor": file.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": normalised,
        "n_group": groups,
        "topk_group": file.get("expert_group_used_count", 1),
    }
    if model_type == "deepseek_v2":
        settings["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return settings


def _phi3(file: GGUFFile, fields: Settings) -> Settings:
    rotary = file.get("rope.dimension_count", fields["head_dim"]) / fields["head_dim"]
    changes: Settings = {"sliding_window": file.get("attention.sliding_window") or None}
    changes["rope_parameters"] = {**fields["rope_parameters"], "partial_rotary_factor": rotary}
    if fields["rope_parameters"]["rope_type"] == "longrope":
        changes["original_max_position_embeddings"] = fields["rope_parameters"]["original_max_position_embeddings"]
    return changes


def _gemma(file: GGUFFile, fields: Settings) -> Settings:
    """Return the settings that Gemma 2 and 3 need in addition to the common ones."""
    # GGUF files do not store query_pre_attn_scalar, so it is derived from the number of layers.
    scalar = fields["head_dim"]
    if fields["num_hidden_layers"] == _GEMMA_27B_LAYERS[file.architecture]:
        scalar = fields["hidden_size"] // fields["num_attention_heads"]
    settings = {"query_pre_attn_scalar": scalar, "sliding_window": file.require("attention.sliding_window")}
    if file.architecture == "gemma2":
        return settings | {cap: file.require(cap) for cap in ("attn_logit_softcapping", "final_logit_softcapping")}
    slides = file.get("attention.sliding_window_pattern", 6)
    if not isinstance(slides, list):
        slides = [bool((layer + 1) % slides) for layer in range(fields["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10000.0)}
    return settings | {
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
    }
