"""What is different in two profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsched.cli import render
from llmsched.engine.errors import LlmschedError
from llmsched.profiles.toml_files import ProfileError, Scalar
from llmsched.profiles.tuned import TunedProfile, load_profile

_TABLES = ("engine", "slo", "workload", "model", "device", "versions")
#: What the chosen setting gave.
_FIGURES = ("goodput_rps", "output_tokens_per_s", "p99_itl_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_e2e_ms")


def between(first: str, second: str) -> dict[str, Any]:
    """Per table the keys that differ, with both values (null: not set); `result` is of the chosen settings.

    Raises LlmschedError for a profile that cannot be read.
    """
    one, other = _load(first), _load(second)
    found: dict[str, Any] = {table: _differences(getattr(one, table), getattr(other, table)) for table in _TABLES}
    found["measured"] = _differences({"measured": one.measured}, {"measured": other.measured})
    return {**found, "result": _differences(_result(one), _result(other))}


def show(first: str, second: str, found: Mapping[str, Any]) -> None:
    rows = [
        [table, key, _text(values[0]), _text(values[1])]
        for table, differing in found.items()
        for key, values in differing.items()
    ]
    if rows:
        render.table("", ["", "", first, second], rows, text_columns=2)
    if not found["engine"]:
        render.say("the settings are the same")
    if found["workload"] or found["device"] or found["model"]:
        render.say("they were found for different loads, models or devices: their results are not to be compared")


def _load(name: str) -> TunedProfile:
    try:
        return load_profile(name)
    except ProfileError as problem:
        raise LlmschedError(str(problem)) from problem


def _differences(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> dict[str, list[Scalar | None]]:
    keys = dict.fromkeys([*one, *other])
    return {key: [one.get(key), other.get(key)] for key in keys if one.get(key) != other.get(key)}


def _result(profile: TunedProfile) -> dict[str, Scalar]:
    """The figures of the trial whose setting the profile has."""
    for trial in profile.trials:
        knobs = [key for key in trial if key in profile.engine]
        if knobs and trial.get("feasible") and all(trial[key] == profile.engine[key] for key in knobs):
            return {name: trial[name] for name in _FIGURES if name in trial}
    return {}


def _text(value: Scalar | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
