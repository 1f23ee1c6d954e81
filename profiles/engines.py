"""Kinds of engines, such as vLLM: the fixed overhead of their steps, and how much of a GPU's peak rates they reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmsched.profiles.gpus import GpuSpec, gpus
from llmsched.profiles.toml_files import find_entry, shipped_table


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a GPU's peak bandwidth and arithmetic rates that an engine reaches."""

    #: engines.toml says of which rate each number is a share.
    matrix: float
    matrix_fp8: float
    matrix_fp8_block: float
    attention: float
    bandwidth: float
    kv: float
    decode: float
    experts: float
    error: float | None = None  # median relative error of TPOT on published results that the fit did not use


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Kind of engine, such as vLLM."""

    key: str
    step_seconds: float  # fixed time of a step
    layer_seconds: float  # fixed time of a step, per layer
    row_seconds: float  # per sampled sequence
    shares: Mapping[str, Efficiency]  # by the key of a GPU, a GPU architecture or "default"

    def on(self, gpu: GpuSpec) -> Efficiency:
        """Return the efficiency on a GPU, or else on the GPU's architecture, or else the default efficiency."""
        return self.shares.get(gpu.key) or self.shares.get(gpu.architecture) or self.shares["default"]


@cache
def engines() -> dict[str, EngineSpec]:
    table = shipped_table("engines.toml")
    default = table["default"]
    return {key: engine_spec(key, entry, None if key == "default" else default) for key, entry in table.items()}


def find_engine(name: str) -> EngineSpec:
    """Return the kind of engine called `name`, ignoring case. Raises UnknownNameError for an unknown name."""
    return find_entry(engines(), name.lower(), "engine class")


def engine_spec(key: str, entry: Mapping[str, Any], default: Mapping[str, Any] | None = None) -> EngineSpec:
    """Build an EngineSpec from a table in engines.toml. Values that `entry` lacks come from `default`."""
    # For each share, the most specific value applies: the value for the GPU, else for its architecture, else under
    # "default". At each of these levels, a value in `entry` comes before a value in `default`. `error` never comes from
    # `default`.
    own, common = entry["on"], {} if default is None else default["on"]
    filled = {**(default or {}), **entry}
    shares = {}
    for kind in {**common, **own}:
        found: dict[str, float] = {}
        for name in ("default", gpus()[kind].architecture if kind in gpus() else kind, kind):
            found |= common.get(name, {}) | own.get(name, {})
        shares[kind] = Efficiency(**{**found, "error": own.get(kind, {}).get("error")})
    return EngineSpec(
        key=key,
        step_seconds=filled["step_us"] * 1e-6,
        layer_seconds=filled["layer_us"] * 1e-6,
        row_seconds=filled["row_us"] * 1e-6,
        shares=shares,
    )
