"""Checks of a model's config.json that decide whether `serve` refuses the model."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmsched.engine.architecture.config_fields import ConfigCache, nested_text, transformers_config
from llmsched.engine.architecture.quantization import settings_of
from llmsched.engine.architecture.served_formats import refusal_of_format
from llmsched.engine.architecture.text_part import text_config
from llmsched.engine.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Architectures whose logits the tests compare with those of transformers. Messages about refused models list them.
TESTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "GPT2LMHeadModel",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GraniteMoeForCausalLM",
    "Glm4MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "MiniCPM3ForCausalLM",
    "SmolLM3ForCausalLM",
    "PhiForCausalLM",
    "Starcoder2ForCausalLM",
    "BloomForCausalLM",
    "FalconForCausalLM",
    "MptForCausalLM",
    "StableLmForCausalLM",
)
#: Classes with recurrent layers that the tests compare too, by model type.
RECURRENT = {
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
SUPPORTED = (
    f"supported: {', '.join((*TESTED, *RECURRENT.values()))} and other decoders that use transformers' attention "
    "interface"
)

#: Models that do not use transformers' attention interface, or whose layers do not hand keywords on to attention
#: (Nemotron), but that the fused decoder can compute.
OWN_ATTENTION = frozenset(
    {"BloomForCausalLM", "FalconForCausalLM", "MptForCausalLM", "NemotronForCausalLM", "StableLmForCausalLM"}
)
#: Classes by model type: DECODERS and RECURRENT pass _check_class, and _INDEXED fail _check_layers. With these tables
#: most models can be checked without importing transformers.
DECODERS = {
    "arcee": "ArceeForCausalLM",
    "bloom": "BloomForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "llama": "LlamaForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mpt": "MptForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
_INDEXED = {"deepseek_v32": "DeepseekV32ForCausalLM"}
_TWICE, _OWN_MASK = "computes attention twice in a layer", "has a mask that is neither causal nor a sliding window"
#: Classes that use transformers' attention interface, but that `probe` refuses.
_UNLIKE = {
    "BertGenerationDecoder": _OWN_MASK,
    "DiffLlamaForCausalLM": _TWICE,
    "DogeForCausalLM": _OWN_MASK,
    "DoryForCausalLM": _TWICE,
    "HrmTextForCausalLM": _TWICE,
}
#: Types that only code in the model's repository can load; serve never runs such code.
_NOT_IN_TRANSFORMERS = frozenset({"nemotron-nas", "openelm"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Further types in the models of RECURRENT.
_RECURRENT_TYPES = frozenset({"attention", "conv", "hybrid", "linear_attention", "mamba", "mlp", "moe"})


def architecture_of(config: PretrainedConfig) -> str:
    """Return the name of the model class in config.json, or "" if there is none."""
    name = str(config.architectures[0]) if config.architectures else ""
    return "MptForCausalLM" if name == "MPTForCausalLM" else name  # MosaicML's own name of the class


def check_supported(config: PretrainedConfig, spec: str) -> None:
    """Raise ModelError if the engine does not support the model `spec`."""
    if reason := _refusal_of_class(config):
        raise ModelError(f"model {spec}: {reason}")


def refusal(content: Mapping[str, Any], cache: ConfigCache | None = None) -> str | None:
    """Return the reason why `serve` refuses a model with this config.json, or None if there is no reason.

    Raises ModelError if transformers rejects the config.
    """
    content = text_config(content)
    decided, reason = refusal_of_file(content)
    if decided:
        return reason

    def ask_transformers() -> str | None:
        foreign = content.get("model_type") in _NOT_IN_TRANSFORMERS  # answered without importing transformers
        if foreign or (config := transformers_config(content)) is None:
            return f"transformers does not know model_type {content.get('model_type')}"
        return _refusal_of_class(config)

    return ask_transformers() if cache is None else cache.get("refusal", ask_transformers)


def refusal_of_file(content: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Check the content of a config.json without importing transformers. Return (conclusive, reason).

    `reason` says why `serve` refuses the model. None: no reason was found. `conclusive` is False if transformers must
    check the config too.
    """
    read = ("architectures", "model_type", "is_encoder_decoder", "layer_types")
    config: Any = SimpleNamespace(**{name: content.get(name) for name in read})
    config.quantization_config = dict(settings_of(content))
    text = nested_text(content)
    config.get_text_config = lambda: config if text is None else text
    name = architecture_of(config)
    known = name in (DECODERS.get(config.model_type), RECURRENT.get(config.model_type))
    reason = _check_kind(config) or _check_quantisation(config)
    if reason is None and _INDEXED.get(config.model_type) == name:
        reason = _has_layers(name, {"indexed_attention"})
    if reason is None and known:
        reason = _check_layers(config)
    return known or reason is not None, reason


def _refusal_of_class(config: PretrainedConfig) -> str | None:
    checks = (_check_kind, _check_quantisation, _check_class, _check_layers)
    return next((reason for check in checks if (reason := check(config))), None)


def _check_kind(config: PretrainedConfig) -> str | None:
    name = architecture_of(config)
    if not name:
        named = config.model_type or "unknown"
        return f"config.json of this {named} model names no architectures, so its class is unknown; {SUPPORTED}"
    if config.is_encoder_decoder:
        return f"{name} has an encoder and a decoder; only decoders can be served; {SUPPORTED}"
    if config.get_text_config() is not config:
        what = f"{name} reads more than text (model type {config.model_type})"
        return f"{what}; only text models can be served; {SUPPORTED}"
    return None


def _check_quantisation(config: PretrainedConfig) -> str | None:
    settings: Any = getattr(config, "quantization_config", None)
    if not settings:
        return None
    return refusal_of_format(settings if isinstance(settings, dict) else settings.to_dict())


def _check_class(config: PretrainedConfig) -> str | None:
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    name = architecture_of(config)
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    if name not in ((named,) if isinstance(named, str) else named):
        return f"{name} (model type {config.model_type}) is not a decoder that transformers can load; {SUPPORTED}"
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return f"{name} is an encoder (model type {config.model_type}): it sees tokens in both directions; {SUPPORTED}"
    if RECURRENT.get(config.model_type) == name:
        return None
    model_class = getattr(transformers, name)
    if model_class._is_stateful:
        return f"{name} has recurrent layers of a kind that is not supported; {SUPPORTED}"
    if name in _UNLIKE:
        return f"{name} {_UNLIKE[name]}, which is not supported; {SUPPORTED}"
    if not model_class._supports_attention_backend and name not in OWN_ATTENTION:
        return f"{name} implements attention itself, without transformers' attention interface; {SUPPORTED}"
    return None


def _check_layers(config: PretrainedConfig) -> str | None:
    name = architecture_of(config)
    known = _LAYER_TYPES | _RECURRENT_TYPES if name in RECURRENT.values() else _LAYER_TYPES
    if unknown := set(getattr(config, "layer_types", None) or ()) - known:
        return _has_layers(name, unknown)
    return None


def _has_layers(name: str, kinds: Set[str]) -> str:
    return f"{name} has layers of type {', '.join(sorted(kinds))}; supported: {', '.join(sorted(_LAYER_TYPES))}"
