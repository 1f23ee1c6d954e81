"""Workloads by name, from workloads/workloads.toml: traces, and settings of synthetic loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llmsched.profiles.toml_files import find_entry, shipped_table

_FOLDER = Path(__file__).parent / "workloads"


@dataclass(frozen=True, slots=True)
class ShippedWorkload:
    """A workload: the `file` of a trace, or if that is None the `settings` by the names of flags."""

    name: str
    about: str
    file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@cache
def workloads() -> Mapping[str, ShippedWorkload]:
    """Return all workloads of workloads.toml by name."""
    return {name: _workload(name, entry) for name, entry in shipped_table("workloads/workloads.toml").items()}


def find_workload(name: str) -> ShippedWorkload:
    """Return the workload called `name`. Raises UnknownNameError."""
    return find_entry(workloads(), name, "workload")


def _workload(name: str, entry: dict[str, Any]) -> ShippedWorkload:
    about, file = entry.pop("about"), entry.pop("file", None)
    return ShippedWorkload(name, about, None if file is None else _FOLDER / file, entry)
