"""What a mode of the bench hands back to be printed, saved and turned into an exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """The report as JSON, how to `show` it to a person, and whether all went `well` (else exit code 1)."""

    report: Mapping[str, Any]
    show: Callable[[], None]
    well: bool
