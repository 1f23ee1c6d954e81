"""What befell one request of a saved run, in order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from llmsched.cli import render


def saved_entries(request: dict[str, Any]) -> list[dict[str, Any]]:
    """What befell a saved request, in order: the client's view, and the decisions on the way. Times count from when the
    request should have been sent.
    """
    due = request["scheduled_s"]

    def entry_of(what: str, begin: float | None, end: float | None = None, **details: Any) -> list[dict[str, Any]]:
        if begin is None:
            return []
        at, until = (round(1e3 * (time - due), 3) for time in (begin, begin if end is None else end))
        return [{"what": what, "at_ms": at, "until_ms": until, "count": 1, "details": details}]

    failure = request["failure"]
    entries = entry_of("due", due) + entry_of("connected", request["connecting_s"], request["connected_s"])
    entries += entry_of("sent", request["sent_s"])
    if (arrived := request["arrived_s"]) is not None:
        shift = 1e3 * (arrived - due)
        entries += [
            {**entry, "at_ms": round(entry["at_ms"] + shift, 3), "until_ms": round(entry["until_ms"] + shift, 3)}
            for entry in request["decisions"]
        ]
    times = [time for time, tokens in request["chunks"] if tokens != 0]
    if times:
        entries += entry_of("first token", times[0])
        if gaps := [(after - before, before) for before, after in pairwise(times)]:
            longest, begin = max(gaps)
            entries += entry_of("longest stall", begin, begin + longest, lasted_ms=round(1e3 * longest, 3))
            entries += entry_of("last token", times[-1])
    if failure is None:
        entries += entry_of("complete", request["end_s"], output_tokens=request["output_tokens"])
    else:
        entries += entry_of("failed", request["end_s"] or due, **failure)
    return sorted(entries, key=lambda entry: entry["at_ms"])


def seen(request: dict[str, Any]) -> str:
    """A line over a request of which only the client's view is known."""
    if request["failure"] is not None:
        return f"failed ({request['failure']['reason']})"
    ttft, e2e = (render.human_seconds(request[name] / 1e3) for name in ("ttft_ms", "e2e_ms"))
    return f"first token after {ttft}, last of {request['output_tokens']} after {e2e}"
