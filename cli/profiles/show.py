"""One profile or calibration, all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmsched.cli import render
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.calibrated import list_calibrations, load_calibration
from llmsched.profiles.toml_files import ProfileError
from llmsched.profiles.tuned import load_profile, profile_path

_TABLES = ("engine", "slo", "workload", "model", "device", "versions", "memory", "cost")


def load(name: str) -> dict[str, Any]:
    """The content of a profile, else of a calibration of that name. Raises LlmschedError when there is neither."""
    try:
        if not profile_path(name).exists() and name in list_calibrations():
            return {"kind": "calibrated", **_plain(asdict(_calibration(name)))}
        profile = load_profile(name)
    except ProfileError as problem:
        raise LlmschedError(str(problem)) from problem
    return {"kind": "tuned", "path": str(profile_path(name)), **_plain(asdict(profile))}


def show(name: str, content: Mapping[str, Any]) -> None:
    origin = "MEASURED" if content.get("measured", True) else "SIMULATED"
    render.say(", ".join((f"{name}: {content['kind']}", origin, *filter(None, (content["created"],)))))
    if content.get("reason"):
        render.say(content["reason"])
    rows = [[table, key, _text(value)] for table in _TABLES for key, value in content.get(table, {}).items()]
    render.table("", ["", "", ""], rows, text_columns=3)
    entries = content.get("trials") or content.get("steps") or ()
    if entries:
        _show_entries("the curve" if "trials" in content else "steps", entries)


def _show_entries(title: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Trials or steps in columns: those that not all of them leave out."""
    columns = list(dict.fromkeys(key for entry in entries for key in entry if key != "reason"))
    render.table(title, columns, [[_text(entry.get(key, "")) for key in columns] for entry in entries])
    for entry in entries:
        if reason := entry.get("reason"):
            render.say(f"{columns[0]} {_text(entry.get(columns[0], ''))}: {reason}")


def _calibration(name: str) -> Any:
    found = load_calibration(name)
    assert found is not None
    return found


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """The content for JSON: the time as text, None where the file does not say."""
    created = content["created"]
    content["created"] = created.isoformat() if created.timestamp() else None
    return content


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
