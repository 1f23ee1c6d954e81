"""Quantised formats of Hugging Face checkpoints that can be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmsched.engine.architecture.quantization import format_name, method_of

SERVED = (
    "fp8, AWQ (gemm), GPTQ (4 and 8 bits), compressed-tensors (int4, int8, fp8, nvfp4, mxfp4), bitsandbytes, "
    "ModelOpt (FP8, NVFP4), mxfp4, and GGUF files"
)
_METHODS = frozenset({"fp8", "fbgemm-fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes", "modelopt", "mxfp4"})
_MODELOPT = frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4"})
#: Types and bits of weights in compressed-tensors.
_COMPRESSED = (("int", 4), ("int", 8), ("float", 8), ("float", 4))


def refusal_of_format(settings: Mapping[str, Any]) -> str | None:
    """Return the reason why weights with this quantization_config are not served, or None if they are."""
    try:
        why = _refusal(method_of(settings), settings)
    except (AttributeError, TypeError, ValueError) as problem:
        why = f"the settings are not in the form of this method, {problem}"
    if why is None:
        return None
    return f"its weights are quantised ({format_name(settings)}: {why}); supported: unquantised weights, {SERVED}"


def own_values(settings: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the values of the setting `name` that GPTQ has for single modules."""
    yield from (rule[name] for rule in (settings.get("dynamic") or {}).values() if name in rule)


def _refusal(method: str, settings: Mapping[str, Any]) -> str | None:
    get = settings.get
    if method not in _METHODS:
        return "not supported"
    bits = get("bits", get("w_bit", 4))
    if method in ("awq", "gptq") and (other := {bits, *own_values(settings, "bits")} - _BITS[method]):
        return f"{', '.join(map(str, other))} bits"
    if method == "awq" and str(get("version") or "gemm").lower() != "gemm":
        return f"layout {get('version')}"
    if method == "gptq" and (get("checkpoint_format") or "gptq") not in ("gptq", "gptq_v2"):
        return f"layout {get('checkpoint_format')}"
    if method == "bitsandbytes" and (get("bnb_4bit_quant_storage") or "uint8") != "uint8":
        return f"codes are stored as {get('bnb_4bit_quant_storage')}"
    if method == "compressed-tensors":
        return _refusal_of_compressed(settings)
    if method == "modelopt":
        layers = (get("quantized_layers") or {}).values()
        names = {str(each.get("quant_algo")) for each in layers} or {str(get("quant_algo"))}
        unknown = sorted(names - _MODELOPT)
        return f"quant_algo {', '.join(unknown)}" if unknown else None
    return None


_BITS = {"awq": {4}, "gptq": {4, 8}}


def _refusal_of_compressed(settings: Mapping[str, Any]) -> str | None:
    if settings.get("transform_config"):
        return "it rotates inputs (transform_config)"
    if ((settings.get("sparsity_config") or {}).get("format") or "dense") != "dense":
        return "weights are sparse"
    groups = (settings.get("config_groups") or {}).values()
    if not groups:
        return "no config_groups"
    for group in groups:
        weights, layout = group.get("weights") or {}, str(group.get("format") or settings.get("format"))
        if weights and (kind := (weights.get("type", "int"), weights.get("num_bits", 8))) not in _COMPRESSED:
            return f"weights of type {kind[0]} with {kind[1]} bits"
        if layout == "marlin-24":
            return f"layout {layout}"
    return None
