"""The scheduler's decisions about a request as JSON: what the server answers and a bench run saves."""

from __future__ import annotations

from collections.abc import Mapping
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


def read_timeline(body: Mapping[str, Any], start: float) -> Timeline:
    """The first choice of what a server explains of a request, taken to have arrived at `start`.

    Raises LookupError or TypeError for what is no such answer.
    """
    from llmsched.engine.core import Timeline
    from llmsched.engine.scheduler.ledger import Entry

    choice = body["choices"][0]
    entries = [
        Entry(
            start + 1e-3 * entry["at_ms"],
            entry["what"],
            entry["details"],
            start + 1e-3 * entry["until_ms"],
            entry["count"],
        )
        for entry in choice["entries"]
    ]
    return Timeline(choice["index"], start, entries)


def _milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)
