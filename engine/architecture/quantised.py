"""What quantised checkpoints take, and what they say about their KV: read from config.json's quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from llmsched.engine.architecture.parameters import Parameters
from llmsched.engine.errors import ConfigError

#: Usual forms of checkpoints, by the names that `--quantization` takes, as their config.json describes them.
QUANTIZATIONS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
_SCALE_BITS = 16
_BLOCK_SCALE_BITS = 32


class Format(NamedTuple):
    """Bits that one number takes, its share of scales and zero points included; None: not quantised."""

    linear: float | None
    experts: float | None


def weight_format(settings: Mapping[str, Any]) -> Format | None:
    """The format that a quantization_config describes; None where it is of a method that is not known.

    fp8: one byte, and one float32 scale for each block where there are blocks. mxfp4: experts alone, 4 bits and an
    8-bit exponent for 32 numbers. awq, gptq, compressed-tensors: bits of the group's scale and zero point are shared
    by group_size numbers. bitsandbytes: a float32 maximum for 64 numbers, or 8 bits of it when quantised twice.
    """
    method = str(settings.get("quant_method", "")).lower()
    if method == "mxfp4":
        return Format(None, 4.25)
    if method in ("fp8", "fbgemm_fp8"):
        rows, columns = settings.get("weight_block_size") or (0, 0)
        return _both(8 + (_BLOCK_SCALE_BITS / (rows * columns) if rows else 0))
    if method in ("awq", "gptq"):
        bits = settings.get("bits") or settings.get("w_bit")
        return _both(_grouped(bits, settings.get("group_size") or settings.get("q_group_size"), zero_point=True))
    if method == "bitsandbytes":
        if settings.get("load_in_8bit"):
            return _both(8)
        return _both(4 + (8 / 64 if settings.get("bnb_4bit_use_double_quant") else 32 / 64))
    if method == "modelopt":
        return _modelopt(str(settings.get("quant_algo", "")).upper())
    if method == "compressed-tensors":
        groups: list[Mapping[str, Any]] = list((settings.get("config_groups") or {}).values())
        weights: Mapping[str, Any] = (groups[0].get("weights") if groups else None) or {}
        return _both(_grouped(weights.get("num_bits"), weights.get("group_size"), not weights.get("symmetric", True)))
    return None


def quantised_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What config.json would say of a checkpoint with its weights in one of QUANTIZATIONS. Raises ConfigError."""
    if name not in QUANTIZATIONS:
        raise ConfigError("quantization", f"must be one of {', '.join(QUANTIZATIONS)}, got {name!r}")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "some form")
        raise ConfigError("quantization", f"{name} is asked for, but the checkpoint is quantised already ({method})")
    return {**config, "quantization_config": dict(QUANTIZATIONS[name])}


def weight_bytes(parameters: Parameters, form: Format, dtype_bytes: int) -> int:
    """Bytes of the weights; embeddings, norms and the parts that see stay in the serving type of `dtype_bytes`."""
    quantised = ((parameters.linear, form.linear), (parameters.experts, form.experts))
    plain = parameters.total - sum(count for count, bits in quantised if bits is not None)
    packed = sum(count * bits / 8 for count, bits in quantised if bits is not None)
    return plain * dtype_bytes + round(packed)


def kv_is_fp8(settings: Mapping[str, Any]) -> bool:
    """Whether the checkpoint brings scales for an fp8 KV cache. fp8 weights alone do not mean that."""
    if (scheme := settings.get("kv_cache_scheme")) is not None:
        return isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float"
    return str(settings.get("kv_cache_quant_algo", "")).upper() == "FP8"


def _both(bits: float | None) -> Format | None:
    return None if bits is None else Format(bits, bits)


def _grouped(bits: Any, group: Any, zero_point: bool) -> float | None:
    """`bits` and a group's share of a 16-bit scale and, with zero_point, of `bits` more. No group: one per row."""
    if not isinstance(bits, int) or bits < 1:
        return None
    shared = _SCALE_BITS + (bits if zero_point else 0)
    return bits + (shared / group if isinstance(group, int) and group > 0 else 0)


def _modelopt(algorithm: str) -> Format | None:
    """NVIDIA's formats: fp8, nvfp4 (4 bits and an 8-bit scale for 16 numbers), int4 in groups of 128."""
    if algorithm == "FP8":
        return _both(8)
    if "NVFP4" in algorithm:
        return _both(4.5)
    return _both(_grouped(4, 128, zero_point=False)) if "W4A16_AWQ" in algorithm else None
