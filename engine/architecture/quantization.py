"""Quantised format of a checkpoint, read from config.json or from hf_quant_config.json (NVIDIA ModelOpt)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmsched.engine.architecture.config_fields import Fields, nested_text, read_json_object
from llmsched.engine.errors import ConfigError, ModelError
from llmsched.engine.model_files import QUANTIZATION_FILE

#: Typical quantization_config for each name that `--quantization` takes.
QUANTIZATIONS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "int8": {"config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": 32}}}},
    "int4": {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None},
}

#: Type in which matrices are multiplied: 16 bits (float32 if activations are float32), fp8 with one scale for each
#: matrix or row, or fp8 with one scale for each block, which is slower.
Arithmetic = Literal["bf16", "fp8", "fp8_block"]


#: Values of quant_method that `_schemes` reads.
_METHODS = ("mxfp4", "fp8", "fbgemm-fp8", "awq", "gptq", "bitsandbytes", "modelopt", "compressed-tensors")

#: Names of quantization_config in config.json.
_SETTINGS = ("quantization_config", "compression_config")

#: Types of models whose checkpoints have a matrix for each expert, but which hold the matrices of all experts joined.
JOINED_EXPERTS = frozenset(
    {"mixtral", "minimax_m2", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"}
    | {"dots1", "glm4_moe_lite", "ernie4_5_moe", "exaone_moe", "hunyuan_v1_moe"}
)

_FORMAT_IN_NAME = re.compile(
    r"(?<![a-z0-9])((?:nv|mx)?fp[48]|awq|gptq|int[48]|w[48]a(?:8|16)|[48]bit|bnb)(?![a-z0-9])", re.IGNORECASE
)

#: Bits per weight of a matrix, scales included; None if it is not quantised.
Bits = float | None


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bits per weight of some modules in a checkpoint."""

    bits: Bits  # with scales and zero points, as in the files
    fp8: bool = False  # True if activations have 8 bits too
    pattern: re.Pattern[str] | None = None  # names of the modules; None for all
    experts: bool = False  # True if the scheme holds only for routed experts
    packed_bits: Bits = None  # as `bits`, in the memory of `llmsched serve`; None: as in the files


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str
    schemes: tuple[Scheme, ...] = ()  # the first that applies to a module determines its bits
    arithmetic: Arithmetic = "bf16"
    fp8_kv: bool = False  # True if the checkpoint has scales for an fp8 KV cache
    known: bool = False  # False for an unknown format
    kv_doubt: str | None = None  # why the type of KV is unclear; None if it is clear
    keeps_experts: bool = False  # True if `llmsched serve` keeps the matrices of routed experts quantised
    order_bits: tuple[float, float] = (0.0, 0.0)  # bits per weight, in memory, of the order of columns; for experts

    def bits(self, module: str, *, expert: bool = False, packed: bool = False) -> Bits:
        """Return the bits per weight of a module's matrix, for example of "model.layers.0.mlp.up_proj".

        If `packed` is True, return the bits in the memory of `llmsched serve`, instead of the bits in the files.
        """
        schemes = (scheme for scheme in self.schemes if expert or not scheme.experts)
        found = next((one for one in schemes if one.pattern is None or one.pattern.search(module)), Scheme(None))
        if not packed or found.bits is None:
            return found.bits
        return (found.packed_bits or found.bits) + self.order_bits[expert]


def with_quantization_file(content: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return the content of a config.json, with missing settings added from the hf_quant_config.json beside it.

    Raises ModelError if that file exists but cannot be read.
    """
    if not (directory / QUANTIZATION_FILE).is_file():
        return content
    found = read_json_object(directory / QUANTIZATION_FILE)
    settings = found.get("quantization", found)
    if not isinstance(settings, Mapping):
        return {**content, "quantization_config": {"quant_method": QUANTIZATION_FILE}}
    return {**content, "quantization_config": {"quant_method": "modelopt", **settings, **settings_of(content)}}


def settings_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization_config in a config.json, which is empty if the weights are not quantised."""
    places = (content, nested_text(content) or {})
    found: Any = next((place[name] for place in places for name in _SETTINGS if place.get(name)), {})
    return found if isinstance(found, Mapping) else {"quant_method": str(found)}


def named_format(name: str) -> str | None:
    """Return the weight format in a model's name, such as FP8 or AWQ, or None."""
    found = _FORMAT_IN_NAME.search(name)
    return None if found is None else found[1]


def quantization_of(fields: Fields) -> Quantization | None:
    """Return the quantised format of a model's checkpoint, or None if the weights are not quantised.

    Raises ModelError if the settings in quantization_config do not fit its quant_method.
    """
    settings = settings_of({"quantization_config": fields.get("quantization_config")})
    if not settings:
        return None
    method = method_of(settings)
    try:
        schemes = [*_schemes(method, settings)]
    except (AttributeError, TypeError, ValueError) as problem:
        raise ModelError(f"quantization_config is not in the form of {method} ({problem})") from problem
    experts = fields.get("expert_dtype") or settings.get("expert_dtype")
    of_experts = [] if experts is None else [Scheme(_bits_named(str(experts)), experts=True)]
    by_name = [scheme for scheme in schemes if scheme.pattern is not None]
    of_all = [scheme for scheme in schemes if scheme.pattern is None][:1]
    stated = {name: value for name, value in settings.items() if "kv" in name}
    fp8_kv, kv = _fp8_kv(stated, method), ", ".join(f"{name} {value!r}" for name, value in stated.items())
    unclear = f"{kv} is not understood" if kv else "the quantisation does not say how KV is stored"
    fp8 = any(scheme.fp8 for scheme in of_all)
    return Quantization(
        method=format_name(settings),
        schemes=(*by_name, *of_experts, *of_all),
        arithmetic="bf16" if not fp8 else "fp8_block" if settings.get("weight_block_size") else "fp8",
        fp8_kv=bool(fp8_kv),
        known=any(scheme.bits for scheme in schemes),
        kv_doubt=f"{unclear}; KV is counted in the type of the model" if fp8_kv is None else None,
        keeps_experts=method == "mxfp4" or fields.model_type in JOINED_EXPERTS,
        order_bits=_order_bits(fields) if settings.get("desc_act") else (0.0, 0.0),
    )


def _order_bits(fields: Fields) -> tuple[float, float]:
    """Estimate the bits per weight of the columns' order in memory (see PackedMatrix), for matrices and for experts."""
    hidden, inner = fields.get("hidden_size"), fields.expert_size
    if not hidden or not isinstance(inner, int):
        return 0.0, 0.0
    # An int64 per column. Most matrices have about `hidden` rows. Gate and up of an expert share one order.
    return 64 / hidden, 64 * (hidden + inner) / (3 * hidden * inner)


def format_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a quantised format for users, such as "awq" or "modelopt NVFP4"."""
    return f"{method_of(settings)} {settings.get('quant_algo') or ''}".strip()


def method_of(settings: Mapping[str, Any]) -> str:
    """Return the quant_method of a quantization_config, or infer the method from the other settings."""
    if method := settings.get("quant_method"):
        name = str(method).lower().replace("_", "-")
        return next((known for known in _METHODS if name == known or name.startswith(f"{known}-")), name)
    signs = {
        "quant_algo": "modelopt",
        "quantized_layers": "modelopt",
        "config_groups": "compressed-tensors",
        "weight_block_size": "fp8",
        "activation_scheme": "fp8",
        "load_in_4bit": "bitsandbytes",
        "load_in_8bit": "bitsandbytes",
        "bits": "gptq",
    }
    return next((method for sign, method in signs.items() if sign in settings), "unknown")


def quantised_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `config` with a quantization_config for the format `name`, such as "awq".

    Raises ConfigError for an unknown name or a checkpoint that is already quantised.
    """
    if name not in QUANTIZATIONS:
        raise ConfigError("quantization", f"must be one of {', '.join(QUANTIZATIONS)}, got {name!r}")
    if settings := settings_of(config):
        method = format_name(settings)
        raise ConfigError("quantization", f"{name} cannot be applied: the checkpoint is already quantised ({method})")
    return {**config, "quantization_config": dict(QUANTIZATIONS[name])}


_KV_LIKE_MODEL = frozenset({"none", "auto", "bf16", "bfloat16", "fp16", "float16"})
#: Methods whose checkpoints have scales for KV only if their settings say so.
_WEIGHTS_ONLY = frozenset({"mxfp4", "fp8", "fbgemm-fp8", "awq", "gptq", "bitsandbytes"})


def _fp8_kv(stated: Mapping[str, Any], method: str) -> bool | None:
    """Return True for KV in fp8, False for KV in the model's type, and None if the settings do not say."""
    if not stated:
        return False if method in _WEIGHTS_ONLY else None
    for scheme in stated.values():
        if not scheme or str(scheme).lower() in _KV_LIKE_MODEL:
            continue
        if isinstance(scheme, Mapping):
            fp8 = scheme.get("num_bits") == 8 and scheme.get("type", "float") == "float"
        else:
            fp8 = re.search(r"fp8|e4m3|e5m2|float8", str(scheme).lower()) is not None
        return fp8 or None
    return False


def _schemes(method: str, settings: Mapping[str, Any]) -> Iterator[Scheme]:
    get = settings.get
    yield from (Scheme(None, pattern=_module_pattern(name)) for name in _ignored(settings))
    match method:
        case "mxfp4":  # only experts, with one 8-bit exponent per 32 weights
            yield Scheme(4.25, experts=True, packed_bits=4.5)
        case "fp8" | "fbgemm-fp8":  # one float32 scale per block, if there are blocks
            rows, columns = get("weight_block_size") or (0, 0)
            yield Scheme(
                8 + (32 / (rows * columns) if rows else 0), fp8=True, packed_bits=8 + (32 / columns if rows else 0)
            )
        case "bitsandbytes":  # 8 bits; or 4 bits and a maximum (32 or 8 bits) per 64 weights
            four = Scheme(4 + (8 / 64 if get("bnb_4bit_use_double_quant") else 32 / 64), packed_bits=4 + 32 / 64)
            yield Scheme(8) if get("load_in_8bit") else four
        case "awq" | "gptq":
            bits, size, symmetric = get("bits"), get("group_size"), method == "gptq" and bool(get("sym"))
            yield _integers(bits, size, symmetric, zero_bits=bits)
            for name, own in (get("dynamic") or {}).items():
                number = own.get("bits", bits)
                changed = _integers(number, own.get("group_size", size), symmetric, zero_bits=number)
                changed = Scheme(None) if name.startswith("-") else changed
                yield replace(changed, pattern=_compiled(re.sub("^[-+]:", "", name)))
        case "modelopt":  # a scheme for each of the quantized_layers or, without these, one for all modules
            layers = get("quantized_layers") or {}
            for name, own in layers.items():
                yield _algorithm(own.get("quant_algo"), own.get("group_size"), _module_pattern(name))
            yield _algorithm(None if layers else get("quant_algo"), get("group_size"))
        case "compressed-tensors":  # groups of modules with settings for weights and activations
            for group in (get("config_groups") or {}).values():
                weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
                number, size = weights.get("num_bits"), weights.get("group_size")
                symmetric = weights.get("symmetric", True)
                scheme = _integers(number, size, symmetric, zero_bits=0 if symmetric else number)
                if weights.get("type") == "float" and number == 4:  # nvfp4 has groups of 16, mxfp4 of 32
                    held = _grouped_bits(number, size, 32 if size == 16 else 16)
                    scheme = Scheme(_grouped_bits(number, size, 8), packed_bits=held)
                for target in group.get("targets") or ["Linear"]:
                    pattern = None if target == "Linear" else _module_pattern(target)
                    yield replace(scheme, fp8=activations.get("num_bits") == 8, pattern=pattern)


def _algorithm(name: Any, group: Any, pattern: re.Pattern[str] | None = None) -> Scheme:
    algorithm = str(name).upper()
    if re.search("W4A16|W4A8_AWQ|INT4", algorithm):
        return Scheme(_grouped_bits(4, group or 128, 16), pattern=pattern)
    packed = 4 + 32 / 16 if algorithm == "NVFP4" else None
    fp8 = "FP4" not in algorithm and "FP8" in algorithm
    return Scheme(_bits_named(algorithm), fp8, pattern, packed_bits=packed)


def _bits_named(name: str) -> Bits:
    return next((bits for sign, bits in _NAMED_BITS.items() if sign in name.upper()), None)


#: Bits per weight of named formats. The first name that a format's name contains counts.
_NAMED_BITS = {
    **{"NVFP4": 4.5, "FP4": 4.25, "MXFP8": 8.25, "FP8_PB": 8 + 32 / 128**2, "FP8": 8.0},
    **{"INT8": 8.0, "W8": 8.0, "INT4": 4.125},
}
#: Settings that list the modules that are not quantised.
_IGNORING = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")


def _ignored(settings: Mapping[str, Any]) -> Iterator[str]:
    for names in filter(None, map(settings.get, _IGNORING)):
        yield from [names] if isinstance(names, str) else names


def _module_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern that matches the module `name` and the modules inside this module.

    `name` may contain the wildcards * and ?. If `name` begins with "re:", the rest is a regular expression.
    """
    # The part of a name before the first "layers." is ignored, because it differs between a text model and the same
    # model inside a multimodal one.
    if name.startswith("re:"):
        return _compiled(re.sub(r"^\^?((language_model|model)\\?\.)*", "", name[3:]))
    inner = re.sub(r"^.*?\b(?=layers\.)", "", name)
    body = re.escape(inner).replace(r"\*", ".*").replace(r"\?", ".").rstrip(".")
    return re.compile(rf"(?:^|\.){body}(?:\.|$)")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise ModelError(f"quantization_config has an invalid pattern {pattern!r} ({problem})") from problem


def _integers(bits: Any, group: Any, symmetric: bool, zero_bits: Any) -> Scheme:
    """Return the scheme of integers with scales of 16 bits. `zero_bits` is the size of a zero point in the files."""
    if not isinstance(bits, int):
        return Scheme(None)
    offset_bits = 32 if not symmetric else 16 if bits == 4 else 0  # see QuantisedMatrix.offset_bytes
    packed = _grouped_bits(bits, group, 16 + offset_bits)
    return Scheme(_grouped_bits(bits, group, 16 + zero_bits), packed_bits=packed)


def _grouped_bits(bits: Any, group: Any, shared: int) -> Bits:
    """Return the bits per weight if `group` weights share a scale and a zero point of `shared` bits in all."""
    if not isinstance(bits, int) or bits < 1:
        return None
    return bits + (shared / group if isinstance(group, int) and group > 0 else 0)
