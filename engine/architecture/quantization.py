"""Reader of a config's quantization_config: bits per weight, the type of matrix products, the type of KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llmsched.engine.architecture.fields import Fields
from llmsched.engine.errors import ConfigError

#: Typical quantization_config for each name that `--quantization` takes.
QUANTIZATIONS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}

#: Type in which matrices are multiplied: 16 bits (float32 if activations are float32), fp8 with one scale for each
#: matrix or row, or fp8 with one scale for each block, which is slower.
Arithmetic = Literal["bf16", "fp8", "fp8_block"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Format of a quantised checkpoint.

    `linear_bits` is the number of bits per weight in dense matrices, `expert_bits` in routed experts, with scales and
    zero points (None: not quantised, or an unknown format). `fp8_kv` is True if the checkpoint has scales for an fp8 KV
    cache; fp8 weights alone do not imply such scales.
    """

    method: str
    linear_bits: float | None = None
    expert_bits: float | None = None
    arithmetic: Arithmetic = "bf16"
    fp8_kv: bool = False

    @property
    def known(self) -> bool:
        return self.linear_bits is not None or self.expert_bits is not None


def quantization_of(fields: Fields) -> Quantization | None:
    """Return the format of a model's checkpoint; None if it is not quantised."""
    settings = fields.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        return Quantization(method=str(settings))
    linear, expert, fp8 = _format_of(settings)
    if (scheme := settings.get("kv_cache_scheme")) is not None:
        fp8_kv = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float"
    else:
        fp8_kv = str(settings.get("kv_cache_quant_algo", "")).upper() == "FP8"
    return Quantization(
        method=str(settings.get("quant_method", "unknown")),
        linear_bits=linear,
        expert_bits=expert,
        arithmetic="bf16" if not fp8 else "fp8_block" if settings.get("weight_block_size") else "fp8",
        fp8_kv=fp8_kv,
    )


def quantised_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `config` with a quantization_config. Raises ConfigError for an unknown name or if it has one."""
    if name not in QUANTIZATIONS:
        raise ConfigError("quantization", f"must be one of {', '.join(QUANTIZATIONS)}, got {name!r}")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "some form")
        raise ConfigError("quantization", f"{name} cannot be applied: the checkpoint is already quantised ({method})")
    return {**config, "quantization_config": dict(QUANTIZATIONS[name])}


def _format_of(settings: Mapping[str, Any]) -> tuple[float | None, float | None, bool]:
    """Return (linear_bits, expert_bits, fp8). `fp8` is True if activations have 8 bits too, so products are in fp8.

    Each format stores scales in addition to the bits of its weights:

    - fp8: one float32 scale per block, if the config sets weight_block_size
    - mxfp4: an 8-bit exponent per 32 weights; only experts are quantised
    - awq, gptq: a 16-bit scale and a zero point per group_size weights
    - compressed-tensors: a 16-bit scale per group_size weights, and a zero point if the weights are asymmetric
    - bitsandbytes with 4 bits: a float32 maximum per 64 weights; with double quantisation, an 8-bit maximum
    - modelopt (NVIDIA): nvfp4 has an 8-bit scale per 16 weights, W4A16_AWQ a 16-bit scale per 128 weights
    """
    method = str(settings.get("quant_method", "")).lower()
    if method == "mxfp4":
        return None, 4.25, False
    bits: float | None = None
    fp8 = method in ("fp8", "fbgemm_fp8")
    if fp8:
        rows, columns = settings.get("weight_block_size") or (0, 0)
        bits = 8 + (32 / (rows * columns) if rows else 0)
    elif method in ("awq", "gptq"):
        group = settings.get("group_size") or settings.get("q_group_size")
        bits = _grouped_bits(settings.get("bits") or settings.get("w_bit"), group, zero_point=True)
    elif method == "bitsandbytes" and settings.get("load_in_8bit"):
        bits = 8
    elif method == "bitsandbytes":
        bits = 4 + (8 / 64 if settings.get("bnb_4bit_use_double_quant") else 32 / 64)
    elif method == "modelopt":
        algorithm = str(settings.get("quant_algo", "")).upper()
        fp8 = algorithm == "FP8"
        if fp8:
            bits = 8
        elif "NVFP4" in algorithm:
            bits = 4.5
        elif "W4A16_AWQ" in algorithm:
            bits = _grouped_bits(4, 128, zero_point=False)
    elif method == "compressed-tensors":
        first: Mapping[str, Any] = next(iter((settings.get("config_groups") or {}).values()), {})
        weights, activations = first.get("weights") or {}, first.get("input_activations") or {}
        bits = _grouped_bits(weights.get("num_bits"), weights.get("group_size"), not weights.get("symmetric", True))
        fp8 = activations.get("num_bits") == 8
    return bits, bits, fp8


def _grouped_bits(bits: Any, group: Any, zero_point: bool) -> float | None:
    """Return the bits that one weight takes, with its share of the 16-bit scale (and zero point) of its group.

    Returns None if `bits` is not a positive whole number.
    """
    if not isinstance(bits, int) or bits < 1:
        return None
    shared = 16 + (bits if zero_point else 0)
    return bits + (shared / group if isinstance(group, int) and group > 0 else 0)
