from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from llmsched.cli import render
from llmsched.profiles.calibrated import Calibration, calibration_dir, list_calibrations, load_calibration
from llmsched.profiles.toml_files import ProfileError, Scalar
from llmsched.profiles.tuned import TunedProfile, list_profiles, load_profile, profile_dir, profile_path

_TABLES = ("engine", "slo", "workload", "model", "device", "versions")
_KNOBS = ("max_num_batched_tokens", "max_num_seqs", "headroom", "target_itl")
_FIGURES = ("goodput_rps", "output_tokens_per_s", "p99_itl_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_e2e_ms")


# -- list --------------------------------------------------------------------------------------------------------


def list_entries() -> list[dict[str, Any]]:
    """Return a JSON object for each profile and calibration, with a `problem` if the file cannot be read."""
    profiles = [_entry(name, "tuned", load_profile) for name in list_profiles()]
    return profiles + [_entry(name, "calibrated", load_calibration) for name in list_calibrations()]


def _entry(name: str, kind: str, load: Callable[[str], TunedProfile | Calibration | None]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "kind": kind}
    entry |= dict.fromkeys(("model", "device", "measured", "summary", "created", "problem"))
    try:
        found = load(name)
    except ProfileError as problem:
        return entry | {"problem": str(problem)}
    if found is None:
        return entry | {"problem": f"calibration {calibration_dir() / name}.toml has just been removed"}
    if isinstance(found, Calibration):
        measured, summary = True, f"median error of step times {found.error:.1%}"
    else:
        measured = found.measured
        summary = ", ".join(f"{knob} {found.engine[knob]}" for knob in _KNOBS if knob in found.engine)
    return entry | {
        "model": str(found.model.get("name", "")) or None,
        "device": str(found.device.get("name", "")) or None,
        "measured": measured,
        "summary": summary or None,
        "created": _iso(found.created),
    }


def _iso(created: datetime) -> str | None:
    return created.isoformat() if created.timestamp() else None


def show_entries(entries: Sequence[Mapping[str, Any]]) -> None:
    if not entries:
        render.say(f"no profiles in {profile_dir()}; create them with `llmsched tune` or `llmsched calibrate`")
        return
    columns = ["name", "kind", "model", "device", "", "", "created"]
    rows = [
        [
            *(entry[key] or "" for key in ("name", "kind", "model", "device")),
            _origin(entry["measured"]),
            entry["summary"] or "",
            (entry["created"] or "")[:16].replace("T", " "),
        ]
        for entry in entries
        if entry["problem"] is None
    ]
    render.table("", columns, rows, text_columns=len(columns))
    for entry in entries:
        if entry["problem"] is not None:
            render.warn(entry["problem"])
    render.say(f"in {profile_dir()}; for details run `llmsched profiles show NAME`")


# -- show --------------------------------------------------------------------------------------------------------


def load_content(name: str) -> dict[str, Any]:
    """Return the profile or, if there is none, the calibration `name` as JSON. Raises ProfileError for a bad file."""
    if not profile_path(name).exists() and name in list_calibrations():
        calibration = load_calibration(name)
        assert calibration is not None
        content = {"kind": "calibrated", **asdict(calibration)}
    else:
        content = {"kind": "tuned", "path": str(profile_path(name)), **asdict(load_profile(name))}
    return content | {"created": _iso(content["created"])}


def show_content(name: str, content: Mapping[str, Any]) -> None:
    origin = _origin(content.get("measured", True))
    render.say(", ".join((f"{name}: {content['kind']}", origin, *filter(None, (content["created"],)))))
    if content.get("reason"):
        render.say(content["reason"])
    tables = (*_TABLES, "knee", "memory", "cost")
    for table in tables:
        values = {key: _text(value) for key, value in content.get(table, {}).items()}
        if "fingerprint" in values:
            values["fingerprint"] = values["fingerprint"][:16]  # the whole one is too long for a terminal
        if values:
            render.table(table, ["", ""], [[f"  {key}", text] for key, text in values.items()], text_columns=2)
    if not (records := content.get("trials") or content.get("steps") or ()):
        return
    columns = list(dict.fromkeys(key for record in records for key in record if key != "reason"))
    cells = [[_text(record.get(key, "")) for key in columns] for record in records]
    kept = [key for key in columns if key in _KNOBS or key in _FIGURES]
    spare = [*reversed(kept[2:]), *(key for key in columns if key not in kept)]
    render.table("trials" if "trials" in content else "steps", columns, cells, spare=spare)
    for record in records:
        if reason := record.get("reason"):
            render.say(f"{columns[0]} {_text(record.get(columns[0], ''))}: {reason}")


# -- diff --------------------------------------------------------------------------------------------------------


def compare_profiles(first: str, second: str) -> dict[str, Any]:
    """Return the keys that differ in each table of two profiles, with both values. Raises ProfileError."""
    one, other = load_profile(first), load_profile(second)
    found: dict[str, Any] = {table: _differences(getattr(one, table), getattr(other, table)) for table in _TABLES}
    found["measured"] = _differences({"measured": one.measured}, {"measured": other.measured})
    return {**found, "result": _differences(_result(one), _result(other))}


def show_differences(first: str, second: str, found: Mapping[str, Any]) -> None:
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
    for trial in profile.trials:
        knobs = [key for key in trial if key in profile.engine]
        if knobs and trial.get("feasible") and all(trial[key] == profile.engine[key] for key in knobs):
            return {name: trial[name] for name in _FIGURES if name in trial}
    return {}


def _origin(measured: bool | None) -> str:
    return "MEASURED" if measured else "SIMULATED"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
