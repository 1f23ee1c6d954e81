"""Fields of generation_config.json: defaults for requests, and unsupported fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields that become defaults of requests -> their names in SamplingParams.
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
#: Fields that transformers ignores if do_sample is false.
_SAMPLING_ONLY = {"temperature", "top_p", "top_k", "min_p"}
#: Fields that are read elsewhere, or have no effect on which tokens a server without beam search generates.
_WITHOUT_EFFECT = frozenset(
    {"do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"}
    | {"_from_model_config", "_commit_hash", "use_cache", "cache_implementation", "cache_config", "max_cache_len"}
    | {"output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"}
    | {"compile_config", "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size"}
    | {"is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"}
    | {"assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind", "use_mtp"}
    | {"prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "early_stopping", "length_penalty"}
    | {"renormalize_logits", "trust_remote_code", "chat_format", "max_window_size"}
)
#: Fields that are off at 1. Every other field is off if it is null, false, 0 or empty.
_OFF_AT_ONE = frozenset(
    {"num_beams", "num_beam_groups", "num_return_sequences", "typical_p", "guidance_scale"}
    | {"encoder_repetition_penalty"}
)


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of SamplingParams fields that generation_config.json sets."""
    # If the file sets do_sample to false, its temperature, top_p, top_k and min_p do not count, as in transformers.
    left_out = _SAMPLING_ONLY if generation.get("do_sample") is False else ()
    found = {
        name: generation[field]
        for field, name in _DEFAULTS.items()
        if field not in left_out and generation.get(field) is not None
    }
    if "stop" in found:
        found["stop"] = (found["stop"],) if isinstance(found["stop"], str) else tuple(found["stop"])
    return found


def ignored_fields(generation: Mapping[str, Any], context: int) -> list[str]:
    """Return the names of unsupported fields that would change the output.

    `context` is the model's maximum context length in tokens.
    """
    return [
        name
        for name, value in generation.items()
        if value
        and name not in _DEFAULTS
        and name not in _WITHOUT_EFFECT
        and not (name in _OFF_AT_ONE and value == 1)
        and not (name == "max_length" and isinstance(value, int) and value >= context)
    ]
