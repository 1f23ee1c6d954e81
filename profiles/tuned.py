"""Tuned profiles: the settings that `tune` found, in a TOML file that a person can read and `serve --profile` loads.

created = 2026-01-31T12:00:00+00:00
measured = true            false: found by simulation
reason = "256 gives the most tokens per second of the values that meet the SLOs"
trials = [ { max_num_batched_tokens = 128, ... }, ... ]     the whole curve

[engine]                   fields of EngineConfig, by their names
max_num_batched_tokens = 256

[slo]  [workload]  [model]  [device]  [versions]            what the choice is good for
[memory]                   actual / predicted bytes, written by `tune`, and by `serve --profile` when it starts
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs
import tomli_w

from llmsched.profiles.gpus import same_gpu

Scalar = str | int | float | bool

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TABLES = ("engine", "slo", "workload", "model", "device", "versions", "memory")
#: The table [memory] up to the next one.
_MEMORY = re.compile(r"^\[memory\][ \t]*(?:#.*)?\n(?:(?!\[).*\n?)*", re.MULTILINE)
_KEYS = {"created", "measured", "reason", "trials", *_TABLES}


class ProfileError(ValueError):
    """A profile cannot be found, read or written; the message is one line for a person."""


@dataclass(frozen=True, slots=True)
class TunedProfile:
    """Settings and what they were found for. Only `engine` is binding, the rest is for people and for warnings.

    `engine` maps field names of EngineConfig to values. `slo` is in milliseconds (ttft_ms, itl_ms, ...), `memory` holds
    actual / predicted bytes (weights_ratio, ...), `trials` one mapping per measured setting. `created` is in UTC.
    Values are never None: what is unknown is left out.
    """

    engine: Mapping[str, Scalar]
    slo: Mapping[str, Scalar] = field(default_factory=dict)
    workload: Mapping[str, Scalar] = field(default_factory=dict)
    model: Mapping[str, Scalar] = field(default_factory=dict)
    device: Mapping[str, Scalar] = field(default_factory=dict)
    versions: Mapping[str, Scalar] = field(default_factory=dict)
    memory: Mapping[str, Scalar] = field(default_factory=dict)
    trials: tuple[Mapping[str, Scalar], ...] = ()
    reason: str = ""
    measured: bool = True
    created: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))


def profile_dir() -> Path:
    """Where profiles live that are called by name: LLMSCHED_PROFILES, else the user's configuration directory."""
    if given := os.environ.get("LLMSCHED_PROFILES"):
        return Path(os.path.expanduser(given))
    return Path(platformdirs.user_config_dir("llmsched")) / "profiles"


def profile_path(name_or_path: str) -> Path:
    """The file of a profile: a path if it has a slash or ends in .toml, else a name in profile_dir().

    Raises ProfileError for a name that could not be a file's.
    """
    if "/" in name_or_path or os.sep in name_or_path or name_or_path.endswith(".toml"):
        return Path(os.path.expanduser(name_or_path))
    if not _NAME.fullmatch(name_or_path):
        raise ProfileError(f"profile {name_or_path!r}: a name has letters, digits, '.', '_' and '-'; or give a path")
    return profile_dir() / f"{name_or_path}.toml"


def list_profiles() -> list[str]:
    """Names of the profiles in profile_dir(), sorted."""
    return sorted(path.stem for path in profile_dir().glob("*.toml"))


def same_model(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> bool:
    """Whether two tables [model] are of one: by the digest of its config.json where both know it, else by its name."""
    key = "digest" if "digest" in one and "digest" in other else "name"
    return one.get(key) == other.get(key)


def same_device(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> bool:
    """Whether two tables [device] are of one; the number of cores matters on a CPU only."""
    keys = ("kind", "cores") if one.get("kind") == "cpu" else ("kind",)
    return all(one.get(key) == other.get(key) for key in keys) and same_gpu(
        str(one.get("name")), str(other.get("name"))
    )


def latest_profile(model: Mapping[str, Scalar], device: Mapping[str, Scalar]) -> tuple[str, TunedProfile] | None:
    """Name and content of the newest profile in profile_dir() that was found for a model on a device.

    A file there that is no profile is passed over.
    """
    found = []
    for name in list_profiles():
        try:
            profile = load_profile(name)
        except ProfileError:
            continue
        if same_model(profile.model, model) and same_device(profile.device, device):
            found.append((name, profile))
    return max(found, key=lambda each: each[1].created.timestamp(), default=None)


def load_profile(name_or_path: str) -> TunedProfile:
    """Read a profile. Raises ProfileError when it is not there or not a profile, naming the key."""
    path = profile_path(name_or_path)
    try:
        content = tomllib.loads(read_file(path))
    except FileNotFoundError as missing:
        known = ", ".join(list_profiles()) or "none yet; `llmsched tune` writes one"
        raise ProfileError(f"profile {name_or_path!r}: no file {path} (profiles by name: {known})") from missing
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ProfileError(f"profile {path}: {_one_line(problem)}") from problem
    return _validated(path, content)


def save_profile(profile: TunedProfile, name_or_path: str) -> Path:
    """Write a profile, replacing an older one at once or not at all. Returns its path; raises ProfileError."""
    path = profile_path(name_or_path)
    content: dict[str, Any] = {"created": profile.created, "measured": profile.measured, "reason": profile.reason}
    content |= {table: dict(getattr(profile, table)) for table in _TABLES}
    content["trials"] = [dict(trial) for trial in profile.trials]
    write_file(path, tomli_w.dumps(content))
    return path


def store_memory(memory: Mapping[str, Scalar], name_or_path: str) -> None:
    """Set the table [memory] of a profile that is there; all else of the file stays as it is, comments as well.

    Raises ProfileError.
    """
    path, present = profile_path(name_or_path), load_profile(name_or_path).memory
    if present == memory:
        return
    text = _MEMORY.sub("", path.read_text(encoding="utf-8")).rstrip("\n")
    text = f"{text}\n\n{tomli_w.dumps({'memory': dict(memory)})}"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise ProfileError(f"profile {path}: its memory is not written as a table [memory] of its own") from problem
    write_file(path, text)


def check_writable(path: Path) -> None:
    """Raise ProfileError, before the work and not after it, where `write_file` could not write; makes the directory."""
    _check_kind(path)
    check_directory(path.parent)


def check_directory(path: Path) -> None:
    """Raise ProfileError where no file can be written in a directory, which is made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as problem:
        raise ProfileError(f"no profile can be written in {path}: {problem.strerror}") from problem


def read_file(path: Path) -> str:
    """The text of a file. Raises OSError, also for what is no file and may have no end (a pipe, a device)."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file")
    return path.read_text(encoding="utf-8")


def _check_kind(path: Path) -> None:
    """Raise ProfileError for what is there and is no file: to replace a device would be to remove it."""
    try:
        if path.exists() and not path.is_file():
            raise ProfileError(f"profile {path} cannot be written: is no file")
    except OSError as problem:
        raise ProfileError(f"profile {path} cannot be written: {problem.strerror}") from problem


def write_file(path: Path, text: str) -> None:
    """Replace a file at once or not at all. Raises ProfileError."""
    _check_kind(path)
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", encoding="utf-8", delete=False) as part:
            part.write(text)
        os.chmod(part.name, 0o644)
        os.replace(part.name, path)
    except OSError as problem:
        if part is not None:
            Path(part.name).unlink(missing_ok=True)
        raise ProfileError(f"profile {path} cannot be written: {_one_line(problem)}") from problem


def _validated(path: Path, content: Mapping[str, Any]) -> TunedProfile:
    if unknown := sorted(content.keys() - _KEYS):
        raise ProfileError(f"profile {path}: unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}")
    if "engine" not in content:
        raise ProfileError(f"profile {path}: the table [engine] with the settings is missing")
    for table in _TABLES:
        _check_table(path, table, content.get(table, {}))
    trials = content.get("trials", [])
    if not isinstance(trials, list):
        raise ProfileError(f"profile {path}: trials is not a list of tables")
    for index, trial in enumerate(trials):
        _check_table(path, f"trials[{index}]", trial)
    reason, created = content.get("reason", ""), content.get("created", datetime.fromtimestamp(0, UTC))
    if not isinstance(reason, str):
        raise ProfileError(f"profile {path}: reason is not a text")
    if not isinstance(measured := content.get("measured", True), bool):
        raise ProfileError(f"profile {path}: measured is neither true nor false")
    if not isinstance(created, datetime):
        raise ProfileError(f"profile {path}: created is not a date and time such as 2026-01-31T12:00:00Z")
    tables = {table: content.get(table, {}) for table in _TABLES}
    return TunedProfile(**tables, trials=tuple(trials), reason=reason, measured=measured, created=created)


def _check_table(path: Path, name: str, table: Any) -> None:
    if not isinstance(table, dict):
        raise ProfileError(f"profile {path}: {name} is not a table")
    for key, value in table.items():
        if not isinstance(value, Scalar):
            raise ProfileError(f"profile {path}: {name}.{key} is neither a text, a number nor true/false")


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())
