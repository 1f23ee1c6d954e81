"""Calibrations: what steps cost on a device that `llmsched calibrate` has measured, in TOML files beside the profiles.

created = 2026-01-31T12:00:00+00:00
error = 0.031                    median relative error on steps that were not fitted to
swap_seconds_per_byte = 1e-10
steps = [ { step = "4 decodes of 512", measured_ms = 34.1, ... }, ... ]

[cost]                           coefficients, by their names in FittedCost
[model]  [device]  [engine]  [versions]       what they are good for
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from llmsched.profiles.tuned import ProfileError, Scalar, profile_dir, read_file, write_file

#: What --simulate takes for the device of this machine.
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
    """Coefficients of a step's cost and what they were measured on.

    `error` is a share, `steps` has one mapping per measured step. `model` has at least name and digest, `device` kind
    and name, `engine` dtype and kv_cache_dtype. `created` is in UTC.
    """

    cost: Mapping[str, float]
    error: float
    swap_seconds_per_byte: float
    model: Mapping[str, Scalar]
    device: Mapping[str, Scalar]
    engine: Mapping[str, Scalar]
    versions: Mapping[str, Scalar] = field(default_factory=dict)
    steps: tuple[Mapping[str, Scalar], ...] = ()
    created: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))

    @property
    def name(self) -> str:
        return calibration_name(
            str(self.model["name"]),
            str(self.device["name"]),
            str(self.engine["dtype"]),
            str(self.engine["kv_cache_dtype"]),
        )


def calibration_dir() -> Path:
    """Where calibrations live: a directory beside the profiles that are called by name."""
    return profile_dir() / "calibrated"


def calibration_name(model: str, device: str, dtype: str, kv_dtype: str) -> str:
    """What a calibration is called: one for each model, device, type of weights and type of KV."""
    kinds = dtype if kv_dtype == dtype else f"{dtype}-{kv_dtype}"
    return re.sub(r"[^A-Za-z0-9._]+", "-", f"{Path(model).name}-{device}-{kinds}").strip("-.")


def list_calibrations() -> list[str]:
    """Names of all calibrations, sorted."""
    return sorted(path.stem for path in calibration_dir().glob("*.toml"))


def load_calibration(name: str) -> Calibration | None:
    """The calibration of that name, None if there is none. Raises ProfileError for a file that is not one."""
    path = calibration_dir() / f"{name}.toml"
    try:
        content = tomllib.loads(read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ProfileError(f"calibration {path}: {' '.join(str(problem).split())}") from problem
    return _validated(path, content)


def save_calibration(calibration: Calibration) -> Path:
    """Write a calibration under its name, replacing an older one. Returns its path; raises ProfileError."""
    path = calibration_dir() / f"{calibration.name}.toml"
    content: dict[str, Any] = {
        name: getattr(calibration, name) for name in ("created", "error", "swap_seconds_per_byte")
    }
    content["steps"] = [dict(step) for step in calibration.steps]
    content |= {table: dict(getattr(calibration, table)) for table in _TABLES}
    write_file(path, tomli_w.dumps(content))
    return path


def _validated(path: Path, content: Mapping[str, Any]) -> Calibration:
    for table in _NEEDED:
        if not isinstance(content.get(table), dict):
            raise ProfileError(f"calibration {path}: the table [{table}] is missing; run `llmsched calibrate` again")
    error, per_byte = content.get("error"), content.get("swap_seconds_per_byte")
    for name, value in {"error": error, "swap_seconds_per_byte": per_byte, **content["cost"]}.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise ProfileError(f"calibration {path}: {name} is {value!r}; a number of 0 or more is understood")
    for table, keys in _NEEDED.items():
        if missing := [key for key in keys if key not in content[table]]:
            raise ProfileError(f"calibration {path}: {table}.{missing[0]} is missing; run `llmsched calibrate` again")
    steps, created = content.get("steps", []), content.get("created", datetime.fromtimestamp(0, UTC))
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ProfileError(f"calibration {path}: steps is not a list of tables")
    if not isinstance(created, datetime):
        raise ProfileError(f"calibration {path}: created is not a date and time such as 2026-01-31T12:00:00Z")
    return Calibration(
        cost=content["cost"],
        error=float(content["error"]),
        swap_seconds_per_byte=float(content["swap_seconds_per_byte"]),
        model=content["model"],
        device=content["device"],
        engine=content["engine"],
        versions=content.get("versions", {}),
        steps=tuple(steps),
        created=created,
    )
