"""Writer of a small transformers model and its tokenizer as a .gguf file, as llama.cpp's converter writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

#: Case -> (architecture of tiny_models, that of GGUF, changes of the configuration).
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama tied": ("llama", "llama", {}),
    "llama untied": ("llama", "llama", {"tie_word_embeddings": False}),
    "llama biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("llama", "llama", {"head_dim": 32}),
    "llama theta": ("llama", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
    "mistral": ("mistral", "llama", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma2", {"query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", "gemma3", {"query_pre_attn_scalar": 32}),
    "mixtral": ("mixtral", "llama", {}),
    "qwen2_moe": ("qwen2_moe", "qwen2moe", {"mlp_only_layers": [], "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", "qwen3moe", {"norm_topk_prob": True}),
    "olmoe": ("olmoe", "olmoe", {}),
    "gpt_oss": (
        "gpt_oss",
        "gpt-oss",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 128},
            }
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        "deepseek2",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
                **{"mscale": 0.707, "mscale_all_dim": 0.707},
            }
        },
    ),
    "deepseek_v3": ("deepseek_v3", "deepseek2", {}),
    "phi3": ("phi3", "phi3", {}),
    "phi3 window": ("phi3", "phi3", {"sliding_window": 8}),
    "phi3 partial rope": (
        "phi3",
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
}

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.sinks": "attn_sinks",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.kv_b_proj.keys": "attn_k_b",
    "self_attn.kv_b_proj.values": "attn_v_b",
    "mlp.gate.e_score_correction": "exp_probs_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any,
    *,
    arch: str,
    pre: str = "gpt-2",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    quantisation: gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType | None] | None = None,
) -> Path:
    """Write `model` (fp32) and its byte-level `tokenizer` to `path`, and return `path`.

    `metadata` adds or replaces keys; a value of None removes the key. `tensors` are added to those of the model.
    Matrices of the model are quantised as `quantisation`, or stay fp32 if it is None. It may depend on their names.
    """
    writer = gguf.GGUFWriter(path, arch)
    values = {**_metadata(model.config, arch), **_vocabulary(tokenizer, pre), **(metadata or {})}
    for key, value in values.items():
        if value is not None:
            _write_value(writer, key, value)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if not (tied and name.startswith("lm_head")):
            changed = _changed(name, parameter.numpy(), model.config, arch)
            for part, values_written in _parts(name, changed, model.config, arch):
                renamed = _gguf_name(part, arch)
                kind = quantisation(renamed) if callable(quantisation) else quantisation
                _write_tensor(
                    writer, renamed, values_written, None if re.search("ffn_gate_inp|bias|attn_k_b", renamed) else kind
                )
    for name, table in (tensors or {}).items():
        _write_tensor(writer, name, table, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any, arch: str) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values = {
        "general.name": "tiny",
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if arch == "deepseek2":
        values |= _latent_metadata(config, arch)
    elif head_dim != config.hidden_size // config.num_attention_heads:
        values |= {f"{arch}.attention.key_length": head_dim, f"{arch}.attention.value_length": head_dim}
    counts = (getattr(config, f"{name}_experts", None) for name in ("num_local", "num", "n_routed"))
    if experts := next(filter(None, counts), None):
        values |= {f"{arch}.expert_count": experts, f"{arch}.expert_used_count": config.num_experts_per_tok}
    for key, setting in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        values[f"{arch}.{key}"] = getattr(config, setting, None)
    if rope["rope_type"] == "yarn":
        values |= {f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.factor": float(rope["factor"])}
        values[f"{arch}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "mscale_all_dim" in rope:
            values[f"{arch}.rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            values[f"{arch}.{key}"] = float(getattr(config, key))
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss") and config.sliding_window:
        values[f"{arch}.attention.sliding_window"] = config.sliding_window
    return values


def _latent_metadata(config: Any, arch: str) -> dict[str, Any]:
    """Return the keys of latent attention: for DeepSeek-V3 as newer versions of the converter write them."""
    key, rope = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim
    values = {"attention.key_length": key, "attention.value_length": config.v_head_dim}
    if config.model_type == "deepseek_v3":
        values = {f"{name}_mla": value for name, value in values.items()}
        values |= {"attention.key_length": config.kv_lora_rank + rope, "attention.value_length": config.kv_lora_rank}
        values |= {"attention.head_count_kv": 1, "expert_gating_func": 2}
    values |= {"attention.q_lora_rank": config.q_lora_rank, "attention.kv_lora_rank": config.kv_lora_rank}
    values |= {"rope.dimension_count": rope, "leading_dense_block_count": config.first_k_dense_replace}
    values |= {"expert_shared_count": config.n_shared_experts, "expert_weights_norm": bool(config.norm_topk_prob)}
    values |= {"expert_weights_scale": float(config.routed_scaling_factor)}
    values |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return {f"{arch}.{name}": value for name, value in values.items()}


def _vocabulary(tokenizer: Any, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens: list[str] = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: npt.NDArray[np.float32],
    quantisation: gguf.GGMLQuantizationType | None,
) -> None:
    if quantisation is None or values.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(values))
    else:
        writer.add_tensor(name, gguf.quantize(values, quantisation), raw_dtype=quantisation)


def _parts(
    name: str, values: npt.NDArray[np.float32], config: Any, arch: str
) -> list[tuple[str, npt.NDArray[np.float32]]]:
    """Return the tensors that the converter makes of one of the model's, with names that all have a suffix."""
    if name.endswith("e_score_correction_bias"):
        return [(f"{name.removesuffix('_bias')}.bias", values)]
    if "kv_b_proj" in name and config.model_type == "deepseek_v3":  # as newer versions of the converter do
        by_head = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, other = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        stem = name.removesuffix(".weight")
        return [(f"{stem}.keys.weight", keys.swapaxes(1, 2)), (f"{stem}.values.weight", other)]
    if name.endswith("sinks"):
        return [(f"{name}.weight", values)]
    if "mlp.experts." not in name:
        return [(name, values)]
    stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
    name = f"{stem}.{'bias' if bias else 'weight'}"
    if arch == "gpt-oss" and not bias:
        values = values.swapaxes(1, 2)
    if "gate_up_proj" not in name:
        return [(name, values)]
    half = values.shape[1] // 2
    halves = (values[:, ::2], values[:, 1::2]) if arch == "gpt-oss" else (values[:, :half], values[:, half:])
    parts = zip(("gate_proj", "up_proj"), halves, strict=True)
    return [(name.replace("gate_up_proj", part), np.ascontiguousarray(half)) for part, half in parts]


def _gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert match is not None, name
    names = _LAYER_NAMES | (_GEMMA_NAMES if arch in ("gemma2", "gemma3") else {})
    if arch == "gpt-oss":
        names = names | {"post_attention_layernorm": "post_attention_norm"}
    return f"blk.{match[1]}.{names[match[2]]}.{kind}"


def _changed(name: str, values: npt.NDArray[np.float32], config: Any, arch: str) -> npt.NDArray[np.float32]:
    """Return the weight as llama.cpp's converter stores it.

    The converter reorders the Q and K rows of Llama for interleaved rope, and adds 1 to the norms of Gemma.
    """
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values
