"""JSON form of a server's live figures, shared by `GET /v1/stats`, `llmsched top` and the status line of `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmsched.engine.units import human_seconds, three_figures

if TYPE_CHECKING:
    from llmsched.engine.kv.misses import MissKind
    from llmsched.engine.recent_stats import Snapshot
    from llmsched.engine.request_summary import RequestSummary
    from llmsched.engine.stats import EngineStats


#: Number of slowest requests in an answer.
NUM_SLOWEST = 10


def stats_body(before: Snapshot, now: Snapshot) -> dict[str, Any]:
    """Return the figures of the time between two snapshots, and the state at the second one.

    Latencies are in milliseconds and None without samples. The KV blocks `requests`, `pinned`, `cached` and
    `free` add up to `total`; a block that both a request and a pin hold counts as pinned.
    """
    old, new = before.stats, now.stats
    window = max(1e-9, now.time - before.time)
    return {
        "object": "stats",
        "window_s": round(window, 3),
        "requests": {
            "running": new.num_running,
            "waiting": new.num_waiting,
            "max_running": new.max_running,
            "ended": {reason.value: count - old.finished[reason] for reason, count in new.finished.items()},
        },
        "output_tokens_per_s": round((new.generation_tokens - old.generation_tokens) / window, 3),
        **latencies(histograms(before, now)),
        "kv_blocks": {
            "total": new.blocks_total,
            "requests": new.blocks_used - new.blocks_pinned,
            "pinned": new.blocks_pinned,
            "cached": new.blocks_cached,
            "free": new.blocks_free,
            "headroom": int(new.headroom * new.blocks_total),
        },
        "swapped_blocks": {"used": new.host_blocks_used, "total": new.host_blocks_total},
        "prefix_cache": _prefix_cache(old, new),
        "preemptions": new.num_preemptions - old.num_preemptions,
        "recomputed_tokens": new.recomputed_tokens - old.recomputed_tokens,
    }


def histograms(before: Snapshot, now: Snapshot) -> dict[str, dict[str, float]]:
    """Return the latencies between two snapshots: the counts of samples up to each bound in seconds, by name."""
    return {name: {str(bound): count for bound, count in now.samples(name, before).items()} for name in now.buckets}


def latencies(samples: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return P50, P95 and P99 of `histograms(...)` in milliseconds, by name with the suffix _ms."""
    return {
        f"{name}_ms": _latency({float(bound): n for bound, n in counts.items()}) for name, counts in samples.items()
    }


def _latency(buckets: Mapping[float, float]) -> dict[str, float | None]:
    from llmsched.engine.recent_stats import quantile

    found = {f"p{percent}": quantile(buckets, percent / 100) for percent in (50, 95, 99)}
    return {share: None if value is None else round(1e3 * value, 3) for share, value in found.items()}


def _prefix_cache(old: EngineStats, new: EngineStats) -> dict[str, Any]:
    queried = new.prefix_queried_tokens - old.prefix_queried_tokens
    hit = new.prefix_hit_tokens - old.prefix_hit_tokens
    counts, earlier = hit_counts(new.prefix_misses), hit_counts(old.prefix_misses)
    return {
        "queried_tokens": queried,
        "hit_tokens": hit,
        "hit_rate": hit / queried if queried else None,
        "requests": {kind: count - earlier[kind] for kind, count in counts.items()},
    }


def hit_counts(misses: Mapping[MissKind, int]) -> dict[str, int]:
    """Return the number of requests by the reason why their prefix hit ended; "hit" if all of the prompt was cached.

    The reason OTHER_SALT counts as COLD, because a tenant must not learn what other tenants have sent.
    """
    counts = {kind.name.lower(): count for kind, count in misses.items()}
    counts["cold"] += counts.pop("other_salt")
    return counts


def status_line(body: Mapping[str, Any]) -> str:
    """Return the most important figures of a `stats_body` as one line."""
    requests, blocks, cache = body["requests"], body["kv_blocks"], body["prefix_cache"]
    held = blocks["requests"] + blocks["pinned"]
    parts = [
        f"{requests['running']} running, {requests['waiting']} waiting",
        f"{three_figures(body['output_tokens_per_s'])} tokens/s",
    ]
    if blocks["total"]:  # models whose layers are all recurrent have no blocks
        parts.append(f"KV {held / blocks['total']:.0%}")
    if (rate := cache["hit_rate"]) is not None:
        parts.append(f"prefix hits {rate:.0%}")
    if preempted := body["preemptions"]:
        parts.append(f"{preempted} preemptions")
    for label, name in (("TTFT", "ttft_ms"), ("ITL", "itl_ms")):
        if (p99 := body[name]["p99"]) is not None:
            parts.append(f"P99 {label} {human_seconds(p99 / 1e3)}")
    return " | ".join(parts)


def summary_body(summary: RequestSummary, now: float) -> dict[str, Any]:
    """Return a request as JSON, with times in milliseconds. `now` is the time of the engine's clock."""
    record = summary.record
    return {
        "id": summary.request_id,
        "object": "request",
        "choice": record.index,
        "state": str(summary.state),
        "arrived_ms_ago": _ms(now - record.arrival_time),
        "longest_wait_ms": _ms(summary.longest_wait),
        "ttft_ms": _ms(summary.ttft),
        "longest_stall_ms": _ms(summary.longest_stall),
        "lasted_ms": _ms(summary.lasted),
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "preemptions": record.num_preemptions,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
