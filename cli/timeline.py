"""JSON form of a request's timeline, shared by the server, `bench --save-detailed` and `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmsched.engine.core import Timeline


def timeline_body(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as JSON, with times in milliseconds after the request arrived."""
    start = timeline.start
    entries = [
        _entry(entry.what, entry.time - start, entry.until - start, entry.details, entry.count)
        for entry in timeline.entries
    ]
    return {"index": timeline.index, "entries": entries}


def routed_entry(routing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a timeline for the choice of a replica, which an ingress made before the request arrived."""
    return _entry("routed", -1e-3 * routing["age_ms"], 0.0, routing)


def read_timeline(body: Mapping[str, Any], start: float) -> Timeline:
    """Return the timeline of the first choice in a server's answer to a request that arrived at `start`."""
    from llmsched.engine.core import Timeline
    from llmsched.engine.scheduler.ledger import Entry

    choice = body["choices"][0]
    entries = []
    for one in choice["entries"]:
        at, until = (start + 1e-3 * one[name] for name in ("at_ms", "until_ms"))
        entries.append(Entry(at, one["what"], one["details"], until, one["count"]))
    return Timeline(choice["index"], start, entries)


def saved_entries(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the client's events and the scheduler's decisions about a request, in order of time.

    `request` is a line of a file that `bench --save-detailed` wrote. Times are in milliseconds after the time at which
    the request should have been sent.
    """
    due = request["scheduled_s"]

    def seen(what: str, begin: float | None, end: float | None = None, **details: Any) -> list[dict[str, Any]]:
        return [] if begin is None else [_entry(what, begin - due, (begin if end is None else end) - due, details)]

    failure = request["failure"]
    entries = seen("due", due) + seen("connected", request["connecting_s"], request["connected_s"])
    entries += seen("sent", request["sent_s"])
    if (arrived := request["arrived_s"]) is not None:
        shift = 1e3 * (arrived - due)
        entries += [
            {**entry, "at_ms": round(entry["at_ms"] + shift, 3), "until_ms": round(entry["until_ms"] + shift, 3)}
            for entry in request["decisions"]
        ]
    times = [time for time, tokens in request["chunks"] if tokens != 0]
    if times:
        entries += seen("first token", times[0])
        if gaps := [(after - before, before) for before, after in pairwise(times)]:
            longest, begin = max(gaps)
            entries += seen("longest stall", begin, begin + longest, lasted_ms=round(1e3 * longest, 3))
            entries += seen("last token", times[-1])
    if failure is None:
        entries += seen("complete", request["end_s"], output_tokens=request["output_tokens"])
    else:
        entries += seen("failed", request["end_s"] or due, **failure)
    return sorted(entries, key=lambda entry: entry["at_ms"])


def _entry(what: str, begin: float, end: float, details: Mapping[str, Any], count: int = 1) -> dict[str, Any]:
    at, until = round(1e3 * begin, 3), round(1e3 * end, 3)
    return {"at_ms": at, "until_ms": until, "what": what, "count": count, "details": details}
