"""Small models of many architectures with random weights, and a byte-level tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

#: More ids than the tokenizer has tokens (about 300), because most real models have a padded vocabulary too.
VOCAB_SIZE = 320
MAX_POSITION = 512
WINDOW = 8

BOS, IM_START, IM_END, PAD = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEXT = "The quick brown fox jumps over the lazy dog. There is nothing either good or bad, but thinking makes it so. "

#: Config fields of most architectures. With a wide initial range, logits differ so much that equal tokens mean parity.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}

_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
}
_ROUTED: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
}

#: Architecture -> (model type in transformers, changes to _COMMON). A value of None removes the key.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}),
    "granitemoe": (
        "granitemoe",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
            **{"head_dim": 32, "use_qk_norm": True},
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT, **_ROUTED, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, **_ROUTED, "n_shared_experts": 1, "norm_topk_prob": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_ROUTED, "n_group": 1, "v_head_dim": 32}),
    "minicpm3": ("minicpm3", {**_LATENT, "scale_emb": 3, "scale_depth": 1.2, "dim_model_base": 32}),
    "youtu": ("youtu", {**_LATENT, "rope_interleave": False}),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "num_hidden_layers": 7},
    ),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None, "rotary_pct": 0.25}),
    "gpt2": (
        "gpt2",
        {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "hidden_size": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "n_positions": MAX_POSITION,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
        },
    ),
    "bloom": (
        "bloom",
        {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "num_hidden_layers": None,
            "num_attention_heads": None,
            "seq_length": MAX_POSITION,
            "n_layer": 3,
            "n_head": 6,
            "hidden_size": 96,
        },
    ),
    "mpt": (
        "mpt",
        {
            **dict.fromkeys(("num_key_value_heads", "intermediate_size", "max_position_embeddings", "hidden_size")),
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads")),
            "max_seq_len": MAX_POSITION,
            "d_model": 96,
            "n_layers": 3,
            "n_heads": 6,
        },
    ),
    "falcon": ("falcon", {"num_key_value_heads": None, "intermediate_size": None, "alibi": False}),
    "falcon_alibi": (
        "falcon",
        {
            **dict.fromkeys(("num_key_value_heads", "intermediate_size")),
            **{"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        },
    ),
    "falcon_new": (
        "falcon",
        {
            **dict.fromkeys(("num_key_value_heads", "intermediate_size")),
            **{"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "phi": ("phi", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8, "head_dim": 16}
_GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

#: Further architectures, which only the tests of the table of families run.
RARE_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": (
        "granite",
        {
            **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
            **{"logits_scaling": 0.5},
        },
    ),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere with norms": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "num_hidden_layers": 4, "logit_scale": 2.0}),
    "nemotron": ("nemotron", {"head_dim": 32}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
            **{"moe_layer_start_index": 1},
        },
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 32}),
    "hunyuan_moe": ("hunyuan_v1_moe", {"head_dim": 32, "num_experts": 4, "moe_topk": 2}),
    "ministral3": (  # scales queries from position 16 on
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 16},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            },
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "seed_oss": ("seed_oss", {"head_dim": 32}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {"head_dim": 16}),
    "opt": ("opt", {"num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_bigcode": (
        "gpt_bigcode",
        {
            **dict.fromkeys(("num_key_value_heads", "intermediate_size", "hidden_size", "num_hidden_layers")),
            **dict.fromkeys(("num_attention_heads", "max_position_embeddings")),
            **{"n_positions": MAX_POSITION, "n_embd": 64, "n_layer": 3, "n_head": 4},
        },
    ),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}),
    "stablelm with norms": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "phimoe": (
        "phimoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": MAX_POSITION, "attention_bias": True},
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            **{**_PER_LAYER, "sliding_window": WINDOW, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
            **{"layer_types": _GEMMA_LAYERS, "intermediate_size": [96] * 4, "laurel_rank": 8},
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **{**_PER_LAYER, "sliding_window": WINDOW, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
            **{"layer_types": _GEMMA_LAYERS, "global_head_dim": 32},
        },
    ),
    "gemma4 with experts": (
        "gemma4_text",
        {
            **{"sliding_window": WINDOW, "num_hidden_layers": 4, "layer_types": _GEMMA_LAYERS, "head_dim": 16},
            **{"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size": 32,
        },
    ),
}

_SPARSE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA: dict[str, Any] = {
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8},
}
_MAMBA1: dict[str, Any] = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings")),
    **{"state_size": 12, "time_step_rank": 4},
}

#: The same for models with recurrent layers.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "qwen3_next": (
        "qwen3_next",
        {
            **{**_DELTA, **_SPARSE},
            **{"shared_expert_intermediate_size": 48, "initializer_range": 0.1},
        },
    ),
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "mamba2": (
        "mamba2",
        {
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size")),
            **{"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 8, "expand": 2},
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 12, "mamba_n_groups": 2},
            **{"mamba_chunk_size": 8, "key_multiplier": 0.7, "ssm_out_multiplier": 0.8, "head_dim": 16},
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **{"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4, "head_dim": 16},
            **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 8},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"moe_shared_expert_intermediate_size": 48, "initializer_range": 0.05},
        },
    ),
    "jamba": (
        "jamba",
        {
            **{"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2},
            **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 12, "mamba_dt_rank": 4},
        },
    ),
    "bamba": (
        "bamba",
        {
            **{"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12},
            **{"mamba_n_groups": 2, "mamba_chunk_size": 8},
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **{"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16},
            **{"mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 8, "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "shared_intermediate_size": 48},
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **{"layer_types": ["conv", "full_attention", "conv"], "num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "num_dense_layers": 1},
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_DELTA, **_SPARSE, "shared_expert_intermediate_size": 48, "initializer_range": 0.1},
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_DELTA, "head_dim": None, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "kimi_linear",
        {
            **{**_LATENT, **_SPARSE, "q_lora_rank": None, "initializer_range": 0.1},
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            **{"linear_num_heads": 4, "linear_head_dim": 16, "n_group": 2, "topk_group": 1},
        },
    ),
    "mamba": ("mamba", _MAMBA1),
    "falcon_mamba": ("falcon_mamba", _MAMBA1),
}

#: Classes of models that are refused, by model type.
REFUSED_ARCHITECTURES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "diffllama": "DiffLlamaForCausalLM",
    "doge": "DogeForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
}


_QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4},
    "image_size": 8,
}
#: Multimodal models: name of the text part in the tables above, class of the whole, settings of the vision encoder.
MULTIMODAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3", "Gemma3ForConditionalGeneration", _VISION),
    "gemma4": ("gemma4", "Gemma4ForConditionalGeneration", {**_VISION, "num_key_value_heads": 2, "head_dim": 8}),
    "mistral3": ("mistral", "Mistral3ForConditionalGeneration", {**_VISION, "model_type": "pixtral", "head_dim": 8}),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForConditionalGeneration", _QWEN_VISION),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _QWEN_VISION),
}


def build_config(arch: str, **overrides: Any) -> Any:
    """Return the config of a small model of `arch`. `overrides` replace values; None removes the key."""
    model_type, changes = (ARCHITECTURES | RARE_ARCHITECTURES | RECURRENT)[arch]
    merged = {**_COMMON, **changes, **overrides}
    keep = {"sliding_window", "eos_token_id", "bos_token_id", "pad_token_id"}
    values = {key: value for key, value in merged.items() if value is not None or key in keep}
    return AutoConfig.for_model(model_type, **values)


def build_multimodal(model_type: str, *, seed: int = 0) -> Any:
    """Return a small fp32 model with a vision encoder, in evaluation mode."""
    arch, name, vision = MULTIMODAL[model_type]
    text = build_config(arch).to_dict()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    return getattr(transformers, name)(config).float().eval()


def build_model(arch: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a small fp32 model in evaluation mode. `seed` determines its random weights, biases, norms and sinks."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(build_config(arch, **overrides)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", ".sinks")) or "norm" in name or ".ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def build_tokenizer(*, bos: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of about 300 tokens. With `bos`, each encoded text begins with <|bos|>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in (BOS, IM_START, IM_END, PAD)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([_TEXT * 4], trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=IM_END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny_model(
    path: Path,
    arch: str,
    *,
    seed: int = 0,
    bos: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a small model and its tokenizer into the directory `path` in Hugging Face's form, and return `path`."""
    model = build_model(arch, seed=seed, **overrides)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    build_tokenizer(bos=bos, chat_template=chat_template).save_pretrained(path)
    return path
