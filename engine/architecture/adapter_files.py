"""LoRA adapters on disk: adapter_config.json and the shapes of the tensors in adapter_model.safetensors, as peft writes
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from llmsched.engine.architecture.config_fields import read_json_object
from llmsched.engine.architecture.quantised_matrix import Stored
from llmsched.engine.architecture.weights import FLOATS, safetensors_header
from llmsched.engine.config import adapter_directories
from llmsched.engine.errors import ModelError

ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)

#: Settings of peft that would change what an adapter computes, in ways that are not supported. They must be off.
_UNSUPPORTED = (
    *("use_dora", "modules_to_save", "lora_bias", "use_qalora", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config", "monteclora_config"),
)
#: Initialisations that also change the weights of the model, so that the adapter fits only the changed model.
_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight")
_MAX_NAMES = 3


class LoraPair(NamedTuple):
    """Matrices A [rank, inputs] and B [outputs, rank] of one module. The module's output grows by scale x B A x."""

    a: str  # name of the tensor
    b: str
    rank: int
    inputs: int
    outputs: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Sizes of LoRA adapters in memory. Each has matrices of `rank` for every module that any of them changes."""

    count: int = 0
    rank: int = 0
    width: int = 0  # numbers of inputs and outputs of these modules, added up

    def num_bytes(self, dtype_bytes: int) -> int:
        return self.count * self.rank * self.width * dtype_bytes


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    name: str
    directory: Path
    base: str  # name of the model for which the adapter was trained, as peft recorded it
    pairs: Mapping[str, LoraPair]  # by name of the module

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())


def read_adapters(lora: Sequence[str] | None) -> tuple[AdapterFiles, ...]:
    """Read the adapters of the setting `lora`. Files are read once per process.

    Raises ConfigError if the setting is invalid, and ModelError for an adapter that is damaged or not supported.
    """
    return tuple(_read(name, directory) for name, directory in adapter_directories(lora).items())


def padded_rank(adapters: Sequence[AdapterFiles]) -> int:
    """Return the rank to which all matrices of the adapters are padded."""
    return max((adapter.rank for adapter in adapters), default=0)


def adapter_sizes(adapters: Sequence[AdapterFiles]) -> AdapterSizes:
    widths = {name: pair.inputs + pair.outputs for adapter in adapters for name, pair in adapter.pairs.items()}
    return AdapterSizes(len(adapters), padded_rank(adapters), sum(widths.values()))


@cache
def _read(name: str, directory: Path) -> AdapterFiles:
    try:
        if not (directory / ADAPTER_CONFIG).is_file():
            raise ModelError(f"has no {ADAPTER_CONFIG}; expected a directory as peft's save_pretrained writes it")
        config = read_json_object(directory / ADAPTER_CONFIG)
        _check_config(config)
        if not (directory / ADAPTER_WEIGHTS).is_file():
            remedy = "; save it as safetensors" if (directory / ADAPTER_PICKLE).is_file() else ""
            raise ModelError(f"has no {ADAPTER_WEIGHTS}{remedy}")
        pairs = _read_pairs(config, safetensors_header(directory / ADAPTER_WEIGHTS))
    except ModelError as problem:
        raise ModelError(f"adapter {name}: {directory}: {problem.message}") from problem
    return AdapterFiles(name, directory, str(config.get("base_model_name_or_path") or "an unnamed model"), pairs)


def _read_pairs(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, LoraPair]:
    """Return the pairs of matrices by module. Raises ModelError for tensors that do not agree with the config."""
    found: dict[str, dict[str, str]] = {}
    unlike = []
    for tensor, stored in tensors.items():
        match = _TENSOR.fullmatch(tensor)
        if match is None or len(stored.shape) != 2:
            unlike.append(tensor)
        elif stored.dtype not in FLOATS:
            raise ModelError(f"{tensor} is of type {stored.dtype}; expected float32, float16 or bfloat16")
        else:
            found.setdefault(match["module"], {})[match["matrix"]] = tensor
    if unlike:
        rest = f" and {len(unlike) - _MAX_NAMES} more" if len(unlike) > _MAX_NAMES else ""
        raise ModelError(f"only pairs of lora_A and lora_B are supported, not {', '.join(unlike[:_MAX_NAMES])}{rest}")
    if not found:
        raise ModelError(f"{ADAPTER_WEIGHTS} has no tensors")
    pairs = {}
    for module, names in found.items():
        if len(names) == 1:
            raise ModelError(f"has only {next(iter(names.values()))}, not the other matrix of {module}")
        if not _is_target(module, config["target_modules"]):
            raise ModelError(f"has tensors for {module}, which target_modules does not name")
        (rank, inputs), (outputs, columns) = tensors[names["A"]].shape, tensors[names["B"]].shape
        stated = _by_pattern(config.get("rank_pattern"), module, config["r"])
        if not rank == columns == stated:
            raise ModelError(f"matrices of {module} have ranks {rank} and {columns}; {ADAPTER_CONFIG} says {stated}")
        alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[module] = LoraPair(names["A"], names["B"], rank, inputs, outputs, scale)
    return pairs


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise ModelError if the adapter of this adapter_config.json cannot be served."""
    kind, targets, init = config.get("peft_type"), config.get("target_modules"), config.get("init_lora_weights")
    if kind != "LORA":
        raise ModelError(f"peft_type is {kind!r}; only LORA is supported")
    if config.get("bias", "none") != "none":
        raise ModelError(f"bias is {config['bias']!r}, which also changes biases of the model; only none is supported")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ModelError(f"{name} is {config[name]!r}, which is not supported")
    if isinstance(init, str) and init.lower().startswith(_CHANGING):
        raise ModelError(
            f"init_lora_weights is {init!r}, which also changes weights of the model; save the adapter as plain LoRA "
            "(path_initial_model_for_weight_conversion of peft)"
        )
    for name in ("r", "lora_alpha"):
        if not _is_positive(value := config.get(name)):
            raise ModelError(f"{name} is {value!r}; expected a number above 0")
    for name in ("rank_pattern", "alpha_pattern"):
        value = config.get(name) or {}
        if not isinstance(value, dict) or not all(map(_is_positive, value.values())):
            raise ModelError(f"{name} is {value!r}; expected numbers above 0 by pattern")
    is_list = isinstance(targets, list) and all(isinstance(each, str) for each in targets)
    if not targets or not (is_list or isinstance(targets, str)):
        raise ModelError(f"target_modules is {targets!r}; expected a list of names, a pattern or all-linear")
    patterns = [targets] if isinstance(targets, str) else []
    for pattern in (*patterns, *(config.get("rank_pattern") or ()), *(config.get("alpha_pattern") or ())):
        try:
            re.compile(pattern)
        except re.error as problem:
            raise ModelError(f"{pattern!r} is no valid pattern: {problem}") from problem


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_target(module: str, targets: str | Sequence[str]) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of the module's name, as peft does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
