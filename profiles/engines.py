"""What classes of engines reach of a GPU, and what their steps cost besides: constants from engines.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from llmsched.profiles.gpus import GpuSpec, gpus


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a GPU's datasheet figures that an engine reaches; engines.toml says of what.

    `error` is the median relative error of TPOT on published measurements that were held back, None where there were
    none.
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
    """A class of engines: seconds per step, per layer and per row of a step, and shares by kind of GPU."""

    key: str
    step_seconds: float
    layer_seconds: float
    row_seconds: float
    shares: Mapping[str, Efficiency]

    def on(self, gpu: GpuSpec) -> Efficiency:
        """What it reaches on this GPU, or else on its architecture, or else on any."""
        return self.shares.get(gpu.key) or self.shares.get(gpu.architecture) or self.shares["default"]


class UnknownEngineError(LookupError):
    """No engine class of that name is listed; the message names those that are."""


@cache
def engines() -> dict[str, EngineSpec]:
    """All engine classes of engines.toml by key."""
    table = tomllib.loads(files(__package__).joinpath("engines.toml").read_text(encoding="utf-8"))
    default = table["default"]
    return {key: engine_spec(key, entry, None if key == "default" else default) for key, entry in table.items()}


def find_engine(name: str) -> EngineSpec:
    """The engine class of that name. Raises UnknownEngineError."""
    found = engines().get(name.lower())
    if found is None:
        raise UnknownEngineError(f"{name!r} is not a known engine class; known are {', '.join(engines())}")
    return found


def engine_spec(key: str, entry: Mapping[str, Any], default: Mapping[str, Any] | None = None) -> EngineSpec:
    """One table of engines.toml, which states only what differs from the table of the `default` class.

    Of a kind of GPU the most special word holds: of typical shares, its architecture's, the class's own ones there,
    then those of the GPU itself, likewise.
    """
    own, common = entry["on"], {} if default is None else default["on"]
    filled = {**(default or {}), **entry}
    return EngineSpec(
        key=key,
        step_seconds=filled["step_us"] * 1e-6,
        layer_seconds=filled["layer_us"] * 1e-6,
        row_seconds=filled["row_us"] * 1e-6,
        shares={kind: _efficiency(kind, own, common) for kind in {**common, **own}},
    )


def _efficiency(kind: str, own: Mapping[str, Any], common: Mapping[str, Any]) -> Efficiency:
    """Shares for a kind of GPU; their error is that of the class's own table."""
    shares: dict[str, float] = {}
    for name in ("default", gpus()[kind].architecture if kind in gpus() else kind, kind):
        shares |= common.get(name, {}) | own.get(name, {})
    return Efficiency(**{**shares, "error": own.get(kind, {}).get("error")})
