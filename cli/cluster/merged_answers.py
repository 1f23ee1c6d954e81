"""Answers of several replicas to the same question, merged into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmsched.cli.live_stats import NUM_SLOWEST, latencies

#: Bodies of answers by the name of the replica.
Bodies = Mapping[str, Mapping[str, Any]]


def merge_stats(bodies: Bodies) -> dict[str, Any]:
    """Merge bodies of GET /v1/stats, which must have histograms. `replicas` has the figures of each replica."""
    each = list(bodies.values())
    bad = [(name, body) for name, body in bodies.items() if body["status"] != "ok"]
    state: dict[str, Any] = {"status": "ok", "error": None}
    if bad:
        state["status"] = bad[0][1]["status"]
        state["error"] = "; ".join(f"replica {name} is {body['status']}: {body['error']}" for name, body in bad)
    merged = _with_hit_rate(_sum(each), "prefix_cache", "queried_tokens", "hit_tokens")
    longest = {name: max(body[name] for body in each) for name in ("window_s", "uptime_s")}
    found = latencies(merged.pop("histograms"))
    replicas = {
        name: {key: value for key, value in body.items() if key not in ("object", "histograms")}
        for name, body in bodies.items()
    }
    return {**merged, **state, **longest, **found, "replicas": replicas}


def merge_cache(bodies: Bodies) -> dict[str, Any]:
    """Merge bodies of GET /v1/cache. Of the changes in prompts, the most frequent one is kept."""
    each = list(bodies.values())
    merged = _with_hit_rate(_sum(each), "prompt_tokens", "queried", "hit")
    changes = [change for body in each if (change := body["prompt_change"]) is not None]
    change = max(changes, key=lambda found: found["count"], default=None)
    return {**merged, "block_size": each[0]["block_size"], "prompt_change": change, "replicas": dict(bodies)}


def merge_slowest(bodies: Bodies) -> dict[str, Any]:
    """Merge bodies of GET /v1/requests/slowest, and name the replica of each request."""
    requests = [{**request, "replica": name} for name, body in bodies.items() for request in body["data"]]
    requests.sort(key=lambda request: -(request["longest_wait_ms"] or 0.0))
    return {"object": "list", "data": requests[:NUM_SLOWEST]}


def _with_hit_rate(body: dict[str, Any], part: str, queried: str, hit: str) -> dict[str, Any]:
    counts = body[part]
    return {**body, part: {**counts, "hit_rate": counts[hit] / counts[queried] if counts[queried] else None}}


def _sum(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of all numbers, also of those in objects. Of other values, the first is taken."""
    return {name: _total([body.get(name) for body in bodies]) for name in bodies[0]}


def _total(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        return _sum(known)
    return sum(known) if isinstance(known[0], int | float) else known[0]
