"""The scheduler's decisions about a request as JSON: what the server answers and a bench run saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmsched.engine.core import Timeline


def timeline_body(timeline: Timeline) -> dict[str, Any]:
    """Entries of one choice; times are milliseconds since the request arrived."""
    return {
        "index": timeline.index,
        "entries": [
            {
                "at_ms": _milliseconds(entry.time - timeline.start),
                "until_ms": _milliseconds(entry.until - timeline.start),
                "what": entry.what,
                "count": entry.count,
                "details": entry.details,
            }
            for entry in timeline.entries
        ],
    }


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)
