"""Loads by name: traces that are shipped, and settings of synthetic ones."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "workloads"


@dataclass(frozen=True, slots=True)
class ShippedWorkload:
    """A load: the `file` of a trace, or, where that is None, `settings` by the names of their flags."""

    name: str
    about: str
    file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class UnknownWorkloadError(LookupError):
    """No load of that name is shipped; the message lists all."""


@cache
def workloads() -> Mapping[str, ShippedWorkload]:
    """All loads of workloads.toml by name."""
    table = tomllib.loads((_FOLDER / "workloads.toml").read_text(encoding="utf-8"))
    return {name: _workload(name, entry) for name, entry in table.items()}


def find_workload(name: str) -> ShippedWorkload:
    """The load called `name`. Raises UnknownWorkloadError."""
    if (found := workloads().get(name)) is None:
        raise UnknownWorkloadError(f"no load is called so; there are {', '.join(workloads())}")
    return found


def _workload(name: str, entry: dict[str, Any]) -> ShippedWorkload:
    about, file = entry.pop("about"), entry.pop("file", None)
    return ShippedWorkload(name, about, None if file is None else _FOLDER / file, entry)
