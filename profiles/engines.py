"""Classes of engines, from engines.toml: shares of a GPU's figures that they reach, and fixed costs of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmsched.profiles.gpus import GpuSpec, gpus
from llmsched.profiles.toml_files import find_entry, shipped_table


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a GPU's datasheet figures that an engine reaches; engines.toml explains each share.

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
    """Class of engines: seconds per step, per layer and per row of a step, and shares by GPU or architecture."""

    key: str
    step_seconds: float
    layer_seconds: float
    row_seconds: float
    shares: Mapping[str, Efficiency]

    def on(self, gpu: GpuSpec) -> Efficiency:
        """Return the shares for this GPU; without these, the shares for its architecture; else the default shares."""
        return self.shares.get(gpu.key) or self.shares.get(gpu.architecture) or self.shares["default"]


@cache
def engines() -> dict[str, EngineSpec]:
    """Return all engine classes of engines.toml by key."""
    table = shipped_table("engines.toml")
    default = table["default"]
    return {key: engine_spec(key, entry, None if key == "default" else default) for key, entry in table.items()}


def find_engine(name: str) -> EngineSpec:
    """Return the engine class called `name`, ignoring case. Raises UnknownNameError if there is no such class."""
    return find_entry(engines(), name.lower(), "engine class")


def engine_spec(key: str, entry: Mapping[str, Any], default: Mapping[str, Any] | None = None) -> EngineSpec:
    """Build a class from its table in engines.toml, which states only what differs from the `default` class.

    The most specific share applies: first the GPU's, then its architecture's, then the typical one; at each level,
    first this class's share, then that of the `default` class. `error` comes only from this class's table.
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
