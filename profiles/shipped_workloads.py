"""Workloads that are shipped with llmsched: traces and settings of synthetic loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llmsched.profiles.toml_files import find_entry, shipped_table


@dataclass(frozen=True, slots=True)
class ShippedWorkload:
    name: str
    about: str  # description for users
    file: Path | None = None  # trace; None for a synthetic load
    settings: Mapping[str, Any] = field(default_factory=dict)  # flags of a synthetic load


@cache
def workloads() -> Mapping[str, ShippedWorkload]:
    folder, found = Path(__file__).parent / "workloads", {}
    for name, entry in shipped_table("workloads/workloads.toml").items():
        about, file = entry.pop("about"), entry.pop("file", None)
        found[name] = ShippedWorkload(name, about, None if file is None else folder / file, entry)
    return found


def find_workload(name: str) -> ShippedWorkload:
    """Return the workload called `name`. Raises UnknownNameError for an unknown name."""
    return find_entry(workloads(), name, "workload")
