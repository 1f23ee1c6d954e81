"""Rows that the parts report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckRow:
    """One check or measurement. `found` and `expected` are for people, `data` is for programs.

    `ok` is None for a measurement, which cannot fail.
    """

    name: str
    found: str
    expected: str = ""
    ok: bool | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def failure(name: str, error: BaseException) -> CheckRow:
    """Make the row of a check that raised an error."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return CheckRow(name, reason[:300], ok=False, data={"error": reason})
