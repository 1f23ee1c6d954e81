"""All profiles and calibrations there are, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from llmsched.cli import render
from llmsched.profiles.calibrated import calibration_dir, list_calibrations, load_calibration
from llmsched.profiles.toml_files import ProfileError
from llmsched.profiles.tuned import TunedProfile, list_profiles, load_profile, profile_dir


@dataclass(frozen=True, slots=True)
class Row:
    """One file: a "tuned" profile or a "calibrated" cost; `what` are its settings or its error, in words.

    `problem` says why it cannot be read, if so; all else is then empty.
    """

    name: str
    kind: str
    model: str = ""
    device: str = ""
    measured: bool | None = None
    what: str = ""
    created: datetime | None = None
    problem: str | None = None


def everything() -> list[Row]:
    """All of profile_dir(), sorted by name, profiles first."""
    return [*map(_profile, list_profiles()), *map(_calibration, list_calibrations())]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "directory": str(profile_dir()),
        "profiles": [
            {
                "name": row.name,
                "kind": row.kind,
                "model": row.model or None,
                "device": row.device or None,
                "measured": row.measured,
                "summary": row.what or None,
                "created": None if row.created is None or not row.created.timestamp() else row.created.isoformat(),
                "problem": row.problem,
            }
            for row in rows
        ],
    }


def show(rows: Sequence[Row]) -> None:
    if not rows:
        render.say(f"no profiles in {profile_dir()}; `llmsched tune` writes one, `llmsched calibrate` a calibration")
        return
    columns = ["name", "kind", "model", "device", "", "", "created"]
    cells = [
        [row.name, row.kind, row.model, row.device, _origin(row.measured), row.what, _date(row.created)]
        for row in rows
        if row.problem is None
    ]
    render.table("", columns, cells, text_columns=len(columns))
    for row in rows:
        if row.problem is not None:
            render.warn(row.problem)
    render.say(f"in {profile_dir()}; `llmsched profiles show NAME` tells more")


def _profile(name: str) -> Row:
    try:
        found = load_profile(name)
    except ProfileError as problem:
        return Row(name, "tuned", problem=str(problem))
    model, device = str(found.model.get("name", "")), str(found.device.get("name", ""))
    return Row(name, "tuned", model, device, found.measured, settings_in_words(found), found.created)


def _calibration(name: str) -> Row:
    try:
        found = load_calibration(name)
    except ProfileError as problem:
        return Row(name, "calibrated", problem=str(problem))
    if found is None:
        return Row(name, "calibrated", problem=f"calibration {calibration_dir() / name}.toml has just been removed")
    error = f"steps {found.error:.1%} off in the median"
    return Row(name, "calibrated", str(found.model["name"]), str(found.device["name"]), True, error, found.created)


def settings_in_words(profile: TunedProfile) -> str:
    """The knobs that `tune` searches, as far as the profile sets them."""
    knobs = ("max_num_batched_tokens", "max_num_seqs", "headroom", "target_itl")
    return ", ".join(f"{knob} {profile.engine[knob]}" for knob in knobs if knob in profile.engine)


def _origin(measured: bool | None) -> str:
    return "MEASURED" if measured else "SIMULATED"


def _date(created: datetime | None) -> str:
    return "" if created is None or created.timestamp() == 0 else f"{created:%Y-%m-%d %H:%M}"
