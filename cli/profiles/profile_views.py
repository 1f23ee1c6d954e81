"""Views of profiles and calibrations: a list, one in full, and the differences of two; each as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from llmsched.cli import render
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.calibrated import calibration_dir, list_calibrations, load_calibration
from llmsched.profiles.toml_files import ProfileError, Scalar
from llmsched.profiles.tuned import TunedProfile, list_profiles, load_profile, profile_dir, profile_path

_TABLES = ("engine", "slo", "workload", "model", "device", "versions")
_KNOBS = ("max_num_batched_tokens", "max_num_seqs", "headroom", "target_itl")
_FIGURES = ("goodput_rps", "output_tokens_per_s", "p99_itl_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_e2e_ms")


# -- list --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """One file: a "tuned" profile or a "calibrated" cost model; `summary` gives its settings or its error in words.

    `problem` says why the file cannot be read; all other fields are then None.
    """

    name: str
    kind: str
    model: str | None = None
    device: str | None = None
    measured: bool | None = None
    summary: str | None = None
    created: datetime | None = None
    problem: str | None = None


def list_entries() -> list[ProfileEntry]:
    """List the files of profile_dir() by name, tuned profiles first."""
    return [*map(_profile_entry, list_profiles()), *map(_calibration_entry, list_calibrations())]


def _profile_entry(name: str) -> ProfileEntry:
    try:
        found = load_profile(name)
    except ProfileError as problem:
        return ProfileEntry(name, "tuned", problem=str(problem))
    model, device = (str(table.get("name", "")) or None for table in (found.model, found.device))
    summary = ", ".join(f"{knob} {found.engine[knob]}" for knob in _KNOBS if knob in found.engine)
    return ProfileEntry(name, "tuned", model, device, found.measured, summary or None, _known(found.created))


def _calibration_entry(name: str) -> ProfileEntry:
    try:
        found = load_calibration(name)
    except ProfileError as problem:
        return ProfileEntry(name, "calibrated", problem=str(problem))
    if found is None:
        path = f"{calibration_dir() / name}.toml"
        return ProfileEntry(name, "calibrated", problem=f"calibration {path} has just been removed")
    model, device = str(found.model["name"]), str(found.device["name"])
    summary = f"median error of step times {found.error:.1%}"
    return ProfileEntry(name, "calibrated", model, device, True, summary, _known(found.created))


def _known(created: datetime) -> datetime | None:
    """Return the time, or None if the file does not state it."""
    return created if created.timestamp() else None


def entries_json(entries: Sequence[ProfileEntry]) -> dict[str, Any]:
    """Return the list as JSON."""
    profiles = [asdict(entry) | {"created": entry.created and entry.created.isoformat()} for entry in entries]
    return {"directory": str(profile_dir()), "profiles": profiles}


def show_entries(entries: Sequence[ProfileEntry]) -> None:
    """Print the list as a table, and a warning for each file that cannot be read."""
    if not entries:
        render.say(f"no profiles in {profile_dir()}; create them with `llmsched tune` or `llmsched calibrate`")
        return
    columns = ["name", "kind", "model", "device", "", "", "created"]
    rows = [
        [
            entry.name,
            entry.kind,
            entry.model or "",
            entry.device or "",
            _origin(entry.measured),
            entry.summary or "",
            f"{entry.created:%Y-%m-%d %H:%M}" if entry.created else "",
        ]
        for entry in entries
        if entry.problem is None
    ]
    render.table("", columns, rows, text_columns=len(columns))
    for entry in entries:
        if entry.problem is not None:
            render.warn(entry.problem)
    render.say(f"in {profile_dir()}; for details run `llmsched profiles show NAME`")


# -- show --------------------------------------------------------------------------------------------------------


def load_content(name: str) -> dict[str, Any]:
    """Load a profile, or else the calibration of that name, as JSON. Raises LlmschedError if it cannot be read."""
    try:
        if not profile_path(name).exists() and name in list_calibrations():
            calibration = load_calibration(name)
            assert calibration is not None
            content = {"kind": "calibrated", **asdict(calibration)}
        else:
            content = {"kind": "tuned", "path": str(profile_path(name)), **asdict(load_profile(name))}
    except ProfileError as problem:
        raise LlmschedError(str(problem)) from problem
    created = _known(content["created"])
    return content | {"created": created and created.isoformat()}


def show_content(name: str, content: Mapping[str, Any]) -> None:
    """Print a profile or calibration: its tables, then its trials or steps."""
    origin = _origin(content.get("measured", True))
    render.say(", ".join((f"{name}: {content['kind']}", origin, *filter(None, (content["created"],)))))
    if content.get("reason"):
        render.say(content["reason"])
    tables = (*_TABLES, "memory", "cost")
    rows = [[table, key, _text(value)] for table in tables for key, value in content.get(table, {}).items()]
    render.table("", ["", "", ""], rows, text_columns=3)
    if not (records := content.get("trials") or content.get("steps") or ()):
        return
    columns = list(dict.fromkeys(key for record in records for key in record if key != "reason"))
    cells = [[_text(record.get(key, "")) for key in columns] for record in records]
    render.table("trials" if "trials" in content else "steps", columns, cells)
    for record in records:
        if reason := record.get("reason"):
            render.say(f"{columns[0]} {_text(record.get(columns[0], ''))}: {reason}")


# -- diff --------------------------------------------------------------------------------------------------------


def compare_profiles(first: str, second: str) -> dict[str, Any]:
    """Return the differing keys of each table with both values (null: not set); `result` compares the chosen settings.

    Raises LlmschedError if a profile cannot be read.
    """
    try:
        one, other = load_profile(first), load_profile(second)
    except ProfileError as problem:
        raise LlmschedError(str(problem)) from problem
    found: dict[str, Any] = {table: _differences(getattr(one, table), getattr(other, table)) for table in _TABLES}
    found["measured"] = _differences({"measured": one.measured}, {"measured": other.measured})
    return {**found, "result": _differences(_result(one), _result(other))}


def show_differences(first: str, second: str, found: Mapping[str, Any]) -> None:
    """Print the differences of two profiles as a table."""
    rows = [
        [table, key, *(_text("-" if value is None else value) for value in values)]
        for table, differing in found.items()
        for key, values in differing.items()
    ]
    if rows:
        render.table("", ["", "", first, second], rows, text_columns=2)
    if not found["engine"]:
        render.say("the settings are the same")
    if found["workload"] or found["device"] or found["model"]:
        render.say("the results are not comparable: the load, model or device differs")


def _differences(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> dict[str, list[Scalar | None]]:
    keys = dict.fromkeys([*one, *other])
    return {key: [one.get(key), other.get(key)] for key in keys if one.get(key) != other.get(key)}


def _result(profile: TunedProfile) -> dict[str, Scalar]:
    """Return the figures of the trial whose setting the profile has."""
    for trial in profile.trials:
        knobs = [key for key in trial if key in profile.engine]
        if knobs and trial.get("feasible") and all(trial[key] == profile.engine[key] for key in knobs):
            return {name: trial[name] for name in _FIGURES if name in trial}
    return {}


def _origin(measured: bool | None) -> str:
    return "MEASURED" if measured else "SIMULATED"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
