"""What the parts report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One check or measurement. `found` beside `expected` is for people; `data` is for programs.

    A measurement cannot fail: `ok` is None.
    """

    name: str
    found: str
    expected: str = ""
    ok: bool | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def failure(name: str, error: BaseException) -> Row:
    """A check that could not be made."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Row(name, reason[:300], ok=False, data={"error": reason})
