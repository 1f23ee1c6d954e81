"""Calibrations: step costs that `llmsched calibrate` measured, stored as TOML files in the profiles directory.

A file looks like this:

    created = 2026-01-31T12:00:00+00:00
    error = 0.031                    # median relative error on steps that the fit did not use
    swap_seconds_per_byte = 1e-10
    steps = [ { step = "4 decodes of 512", measured_ms = 34.1, ... }, ... ]

    [cost]                           # coefficients, by their names in FittedCost
    [model]  [device]  [engine]  [versions]       # what was measured
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from llmsched.profiles.toml_files import ProfileError, Scalar, created_in, names_in, now, read_toml, write_file
from llmsched.profiles.tuned import profile_dir

#: Value of --simulate that selects this machine's device.
LOCAL = "local"

_TABLES = ("cost", "model", "device", "engine", "versions")
_NEEDED = {
    "cost": ("step", "token"),
    "model": ("name", "digest"),
    "device": ("kind", "name"),
    "engine": ("dtype", "kv_cache_dtype"),
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients of a FittedCost, with the model, the device and the engine on which they were measured."""

    cost: Mapping[str, float]
    error: float  # median relative error of step times: 0.03 means 3 %
    swap_seconds_per_byte: float
    model: Mapping[str, Scalar]  # has at least name and digest
    device: Mapping[str, Scalar]  # has at least kind and name
    engine: Mapping[str, Scalar]  # has at least dtype and kv_cache_dtype
    versions: Mapping[str, Scalar] = field(default_factory=dict)
    steps: tuple[Mapping[str, Scalar], ...] = ()
    created: datetime = field(default_factory=now)  # in UTC

    @property
    def name(self) -> str:
        names = (self.model["name"], self.device["name"], self.engine["dtype"], self.engine["kv_cache_dtype"])
        return calibration_name(*map(str, names))


def calibration_dir() -> Path:
    return profile_dir() / "calibrated"


def calibration_name(model: str, device: str, dtype: str, kv_dtype: str) -> str:
    kinds = dtype if kv_dtype == dtype else f"{dtype}-{kv_dtype}"
    return re.sub(r"[^A-Za-z0-9._]+", "-", f"{Path(model).name}-{device}-{kinds}").strip("-.")


def list_calibrations() -> list[str]:
    return names_in(calibration_dir())


def load_calibration(name: str) -> Calibration | None:
    """Load the calibration `name`, or return None if there is no file. Raises ProfileError for an invalid file."""
    path = calibration_dir() / f"{name}.toml"
    try:
        return _validated(path, read_toml(path, "calibration"))
    except FileNotFoundError:
        return None


def save_calibration(calibration: Calibration) -> Path:
    """Write a calibration to the file that is named after it, and return the path of the file.

    Raises ProfileError if the file cannot be written.
    """
    path = calibration_dir() / f"{calibration.name}.toml"
    content: dict[str, Any] = {
        name: getattr(calibration, name) for name in ("created", "error", "swap_seconds_per_byte")
    }
    content["steps"] = [dict(step) for step in calibration.steps]
    content |= {table: dict(getattr(calibration, table)) for table in _TABLES}
    write_file(path, tomli_w.dumps(content))
    return path


def _validated(path: Path, content: Mapping[str, Any]) -> Calibration:
    where = f"calibration {path}"
    for table in _NEEDED:
        if not isinstance(content.get(table), dict):
            raise ProfileError(f"{where}: the table [{table}] is missing; run `llmsched calibrate` again")
    numbers = {name: content.get(name) for name in ("error", "swap_seconds_per_byte")}
    for name, value in {**numbers, **content["cost"]}.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise ProfileError(f"{where}: {name} is {value!r}; it must be a number of 0 or more")
    for table, keys in _NEEDED.items():
        if missing := [key for key in keys if key not in content[table]]:
            raise ProfileError(f"{where}: {table}.{missing[0]} is missing; run `llmsched calibrate` again")
    steps = content.get("steps", [])
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ProfileError(f"{where}: steps is not a list of tables")
    return Calibration(
        **{table: content.get(table, {}) for table in _TABLES},
        error=float(content["error"]),
        swap_seconds_per_byte=float(content["swap_seconds_per_byte"]),
        steps=tuple(steps),
        created=created_in(where, content),
    )
