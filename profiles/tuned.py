"""Tuned profiles: settings that `tune` found, stored as TOML files that `serve --profile` loads.

A file looks like this:

    created = 2026-01-31T12:00:00+00:00
    measured = true            # false: found by simulation
    reason = "256 gives the most tokens per second of the values that meet the SLOs"
    trials = [ { max_num_batched_tokens = 128, ... }, ... ]     # all values that were tried

    [engine]                   # fields of EngineConfig, by their names
    max_num_batched_tokens = 256

    [slo]  [workload]  [model]  [device]  [versions]            # conditions under which the settings were found
    [knee]                     # highest request rates that meet the SLOs, and the gain over the default
    [memory]                   # actual / predicted bytes, written by `tune` and by `serve --profile` when it starts
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import platformdirs
import tomli_w

from llmsched.profiles.toml_files import (
    ProfileError,
    Scalar,
    check_table,
    created_in,
    names_in,
    now,
    read_toml,
    write_file,
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TABLES = ("engine", "slo", "workload", "model", "device", "versions", "memory", "knee")
#: Lines of the table [memory], up to the next table.
_MEMORY = re.compile(r"^\[memory\][ \t]*(?:#.*)?\n(?:(?!\[).*\n?)*", re.MULTILINE)
_KEYS = {"created", "measured", "reason", "trials", *_TABLES}


@dataclass(frozen=True, slots=True)
class TunedProfile:
    """Settings that `tune` found, and the conditions under which the settings were found."""

    engine: Mapping[str, Scalar]  # fields of EngineConfig
    slo: Mapping[str, Scalar] = field(default_factory=dict)  # in milliseconds (ttft_ms, itl_ms, ...)
    workload: Mapping[str, Scalar] = field(default_factory=dict)
    model: Mapping[str, Scalar] = field(default_factory=dict)
    device: Mapping[str, Scalar] = field(default_factory=dict)
    versions: Mapping[str, Scalar] = field(default_factory=dict)
    memory: Mapping[str, Scalar] = field(default_factory=dict)  # actual / predicted bytes (weights_ratio, ...)
    knee: Mapping[str, Scalar] = field(default_factory=dict)
    trials: tuple[Mapping[str, Scalar], ...] = ()
    reason: str = ""
    measured: bool = True
    created: datetime = field(default_factory=now)  # in UTC


def profile_dir() -> Path:
    """Return the directory of named profiles: $LLMSCHED_PROFILES, or else a folder in the user's config directory."""
    if given := os.environ.get("LLMSCHED_PROFILES"):
        return Path(os.path.expanduser(given))
    return Path(platformdirs.user_config_dir("llmsched")) / "profiles"


def profile_path(name_or_path: str) -> Path:
    """Return the path of a profile's file. A `name_or_path` with a slash or with the ending .toml is a path.

    Raises ProfileError for an invalid name.
    """
    if "/" in name_or_path or os.sep in name_or_path or name_or_path.endswith(".toml"):
        return Path(os.path.expanduser(name_or_path))
    if not _NAME.fullmatch(name_or_path):
        raise ProfileError(f"profile {name_or_path!r}: a name has letters, digits, '.', '_' and '-'; or give a path")
    return profile_dir() / f"{name_or_path}.toml"


def list_profiles() -> list[str]:
    return names_in(profile_dir())


def load_profile(name_or_path: str) -> TunedProfile:
    """Load a profile. Raises ProfileError if the file is missing or invalid."""
    path = profile_path(name_or_path)
    try:
        return _validated(path, read_toml(path, "profile"))
    except FileNotFoundError as missing:
        known = ", ".join(list_profiles()) or "none yet; `llmsched tune` writes one"
        raise ProfileError(f"profile {name_or_path!r}: no file {path} (profiles by name: {known})") from missing


def save_profile(profile: TunedProfile, name_or_path: str) -> Path:
    """Write a profile and return the path of the file. Raises ProfileError if the file cannot be written."""
    path = profile_path(name_or_path)
    content: dict[str, Any] = {"created": profile.created, "measured": profile.measured, "reason": profile.reason}
    content |= {table: dict(getattr(profile, table)) for table in _TABLES}
    content["trials"] = [dict(trial) for trial in profile.trials]
    write_file(path, tomli_w.dumps(content))
    return path


def store_memory(memory: Mapping[str, Scalar], name_or_path: str) -> None:
    """Replace the table [memory] in a profile's file, and keep everything else, including comments.

    Raises ProfileError if the file cannot be read or written.
    """
    path, present = profile_path(name_or_path), load_profile(name_or_path).memory
    if present == memory:
        return
    text = _MEMORY.sub("", path.read_text(encoding="utf-8")).rstrip("\n")
    text = f"{text}\n\n{tomli_w.dumps({'memory': dict(memory)})}"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ProfileError(f"profile {path}: its memory is not written as a table [memory]") from problem
    write_file(path, text)


def _validated(path: Path, content: Mapping[str, Any]) -> TunedProfile:
    where = f"profile {path}"
    if unknown := sorted(content.keys() - _KEYS):
        raise ProfileError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    if "engine" not in content:
        raise ProfileError(f"{where}: the table [engine] with the settings is missing")
    tables = {table: content.get(table, {}) for table in _TABLES}
    for name, table in tables.items():
        check_table(f"{where}: {name}", table)
    trials, reason, measured = content.get("trials", []), content.get("reason", ""), content.get("measured", True)
    if not isinstance(trials, list):
        raise ProfileError(f"{where}: trials is not a list of tables")
    for index, trial in enumerate(trials):
        check_table(f"{where}: trials[{index}]", trial)
    if not isinstance(reason, str):
        raise ProfileError(f"{where}: reason is not a string")
    if not isinstance(measured, bool):
        raise ProfileError(f"{where}: measured is neither true nor false")
    created = created_in(where, content)
    return TunedProfile(**tables, trials=tuple(trials), reason=reason, measured=measured, created=created)
