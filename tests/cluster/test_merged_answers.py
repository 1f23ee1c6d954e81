"""Answers of several replicas become one: sums, quantiles of the joined histograms, and the figures of each."""

from __future__ import annotations

from typing import Any

import pytest

from llmsched.cli.cluster.merged_answers import merge_cache, merge_slowest, merge_stats


def stats(status: str = "ok", hits: int = 50, running: int = 1, fast: int = 10, slow: int = 0) -> dict[str, Any]:
    return {
        "object": "stats",
        "model": "tiny",
        "status": status,
        "error": None if status == "ok" else "the engine hangs",
        "uptime_s": float(running),
        "window_s": 60.0,
        "requests": {"running": running, "ended": {"stop": 2}},
        "prefix_cache": {"queried_tokens": 100, "hit_tokens": hits, "hit_rate": hits / 100},
        "ttft_ms": {"p50": 1.0, "p95": None, "p99": None},
        "histograms": {"ttft": {"1.0": fast, "2.0": fast + slow, "inf": fast + slow}},
    }


def test_counts_are_added_and_quantiles_are_those_of_all_samples() -> None:
    merged = merge_stats({"a": stats(fast=10), "b": stats(hits=100, running=2, fast=0, slow=10)})
    assert merged["requests"] == {"running": 3, "ended": {"stop": 4}}
    assert merged["prefix_cache"] == {"queried_tokens": 200, "hit_tokens": 150, "hit_rate": 0.75}
    assert merged["ttft_ms"]["p50"] == pytest.approx(1000)  # ten samples up to 1 s, ten up to 2 s
    assert merged["ttft_ms"]["p95"] == pytest.approx(1900)
    assert (merged["window_s"], merged["uptime_s"], merged["model"]) == (60.0, 2.0, "tiny")
    assert merged["replicas"]["b"]["requests"]["running"] == 2
    assert "histograms" not in {**merged, **merged["replicas"]["a"]}


def test_one_replica_that_fails_is_named() -> None:
    merged = merge_stats({"a": stats(), "b": stats("unhealthy")})
    assert (merged["status"], merged["error"]) == ("unhealthy", "replica b is unhealthy: the engine hangs")


def test_caches_are_added_and_the_most_frequent_change_is_kept() -> None:
    def cache(count: int | None) -> dict[str, Any]:
        change = None if count is None else {"position": 1, "count": count}
        tokens = {"queried": 10, "hit": 5, "hit_rate": 0.5}
        return {"block_size": 16, "blocks": {"total": 4}, "prompt_tokens": tokens, "prompt_change": change}

    merged = merge_cache({"a": cache(3), "b": cache(None), "c": cache(7)})
    assert (merged["block_size"], merged["blocks"]["total"], merged["prompt_tokens"]["hit_rate"]) == (16, 12, 0.5)
    assert merged["prompt_change"]["count"] == 7
    assert list(merged["replicas"]) == ["a", "b", "c"]
    assert merge_cache({"a": cache(None)})["prompt_change"] is None


def test_the_slowest_requests_of_all_replicas_are_sorted() -> None:
    waits = {"a": [5.0, 1.0, None], "b": [9.0] * 9}
    bodies = {name: {"data": [{"longest_wait_ms": wait} for wait in each]} for name, each in waits.items()}
    slowest = merge_slowest(bodies)["data"]
    assert [each["longest_wait_ms"] for each in slowest] == [9.0] * 9 + [5.0]
    assert (slowest[0]["replica"], slowest[-1]["replica"]) == ("b", "a")
