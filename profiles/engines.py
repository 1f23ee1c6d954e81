"""Classes of engines, from engines.toml: shares of a GPU's figures that they reach, and costs of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmsched.profiles.gpus import GpuSpec, gpus
from llmsched.profiles.toml_files import find_entry, shipped_table


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a GPU's datasheet figures that an engine reaches; engines.toml says of which figures.

    `error` is the median relative error of TPOT on published results left out of the fit; None if there were none.
    """

    matrix: float
    matrix_fp8: float
    matrix_fp8_block: float
    attention: float
    bandwidth: float
    kv: float
    decode: float
    experts: float
    error: float | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A class of engines: seconds per step, per layer and per row of a step, and shares by GPU or architecture."""

    key: str
    step_seconds: float
    layer_seconds: float
    row_seconds: float
    shares: Mapping[str, Efficiency]

    def on(self, gpu: GpuSpec) -> Efficiency:
        """Return the shares for this GPU, or else for its architecture, or else the default shares."""
        return self.shares.get(gpu.key) or self.shares.get(gpu.architecture) or self.shares["default"]


@cache
def engines() -> dict[str, EngineSpec]:
    """Return all engine classes of engines.toml by key."""
    table = shipped_table("engines.toml")
    default = table["default"]
    return {key: engine_spec(key, entry, None if key == "default" else default) for key, entry in table.items()}


def find_engine(name: str) -> EngineSpec:
    """Return the engine class called `name`, in any case. Raises UnknownNameError."""
    return find_entry(engines(), name.lower(), "engine class")


def engine_spec(key: str, entry: Mapping[str, Any], default: Mapping[str, Any] | None = None) -> EngineSpec:
    """Build a class from its table in engines.toml, which states only what differs from the `default` class.

    The most specific share applies: the GPU's own before its architecture's before the typical ones, and at each of
    these levels the class's before the default class's. Their error is from the class's own table.
    """
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
