"""GET /v1/stats and /v1/requests/slowest: the figures behind the page, `llmsched top` and the status line."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from scripted import ScriptedServer

from llmsched.cli.live_stats import status_line
from llmsched.cli.serve.access import Access


def get(server: ScriptedServer, path: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(server.url + path, headers=headers, timeout=20)


def complete(server: ScriptedServer, prompt: str, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_an_idle_server(make_server: Callable[..., ScriptedServer]) -> None:
    body = get(make_server(num_blocks=64, max_num_seqs=8), "/v1/stats").json()
    nothing = {"p50": None, "p95": None, "p99": None}
    assert (body["model"], body["status"], body["error"]) == ("scripted", "ok", None)
    assert body["window_s"] == pytest.approx(body["uptime_s"], abs=1)
    assert body["requests"]["ended"] == {"stop": 0, "length": 0, "abort": 0, "deadline": 0, "error": 0}
    assert body["ttft_ms"] == body["itl_ms"] == nothing
    assert body["prefix_cache"]["hit_rate"] is None
    blocks = body["kv_blocks"]
    assert (blocks["total"], blocks["free"]) == (64, 64)
    assert 0 < blocks["headroom"] < 64


def test_the_figures_of_a_load(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server()
    server.script.step_s = 0.01
    for _ in range(3):
        complete(server, "a b c d e f g h " * 8)
    body = get(server, "/v1/stats").json()
    assert body["requests"]["ended"]["length"] == 3
    assert body["output_tokens_per_s"] * body["window_s"] == pytest.approx(3 * 8, rel=0.01)
    for name in ("ttft_ms", "itl_ms"):
        p50, p95, p99 = body[name].values()
        assert 5 <= p50 <= p95 <= p99, name
    blocks, cache = body["kv_blocks"], body["prefix_cache"]
    assert sum(blocks[state] for state in ("requests", "pinned", "cached", "free")) == blocks["total"]
    assert blocks["cached"] > 0
    assert cache["requests"]["hit"] == 2
    assert cache["requests"]["cold"] == 1
    assert "other_salt" not in cache["requests"]
    assert cache["hit_rate"] == pytest.approx(cache["hit_tokens"] / cache["queried_tokens"])
    line = status_line(body)
    assert line.startswith("0 running, 0 waiting | ")
    assert f"prefix hits {cache['hit_rate']:.0%}" in line


def test_pins_and_preemptions_are_counted(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(num_blocks=40, max_model_len=256, scheduling_policy="fcfs", headroom=0.0)
    assert httpx.post(f"{server.url}/v1/prefixes", json={"prompt": "a b c d " * 8}).status_code == 200
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda number: complete(server, f"{number} b c d " * 8, max_tokens=120), range(8)))
    assert all(each["id"].startswith("cmpl-") for each in get(server, "/v1/requests/slowest").json()["data"])
    body, told = get(server, "/v1/stats").json(), get(server, "/metrics").text
    blocks = body["kv_blocks"]
    assert blocks["pinned"] > 0
    assert sum(blocks[state] for state in ("requests", "pinned", "cached", "free")) == blocks["total"]
    (count,) = [line.split()[-1] for line in told.splitlines() if line.startswith("llmsched:num_preemptions_total")]
    assert body["preemptions"] == float(count) > 0


def test_the_slowest_requests_come_first_with_their_timelines(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(max_num_seqs=1)
    quick = complete(server, "a b")
    server.script.step_s = 0.02
    with ThreadPoolExecutor() as pool:
        slow = set(pool.map(lambda prompt: complete(server, prompt, n=2), ("c d", "e f")))
    found = get(server, "/v1/requests/slowest").json()["data"]
    assert [request["id"] for request in found[2:]] == [quick]
    assert {request["id"] for request in found[:2]} == slow
    waits = [request["longest_wait_ms"] for request in found]
    assert waits == sorted(waits, reverse=True)
    assert waits[1] >= 9 * 20  # the second choice waits for the 8 steps of the first
    for request in found:
        assert (request["state"], request["output_tokens"], request["preemptions"]) == ("length", 8, 0)
        assert request["longest_wait_ms"] == max(request["ttft_ms"], request["longest_stall_ms"])
        choices = get(server, f"/v1/requests/{request['id']}/explain").json()["choices"]
        choice = next(choice for choice in choices if choice["index"] == request["choice"])
        assert choice["summary"].startswith("waited ")
        assert all(isinstance(entry["why"], str) for entry in choice["entries"])


def test_requests_that_have_not_ended_are_shown(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(max_num_seqs=1)
    server.script.step_s = 0.02
    with ThreadPoolExecutor() as pool:
        pool.submit(complete, server, "c d", max_tokens=60)
        while get(server, "/v1/stats").json()["output_tokens_per_s"] == 0:
            time.sleep(0.01)
        pool.submit(complete, server, "e f")
        while get(server, "/v1/stats").json()["requests"]["waiting"] == 0:
            time.sleep(0.01)
        states = {each["state"]: each for each in get(server, "/v1/requests/slowest").json()["data"]}
    assert states.keys() == {"running", "waiting"}
    assert states["waiting"]["ttft_ms"] is None
    assert states["waiting"]["longest_wait_ms"] == states["waiting"]["lasted_ms"]
    assert states["running"]["longest_wait_ms"] >= states["running"]["ttft_ms"] > 0


@pytest.mark.parametrize(
    ("access", "key", "stats", "slowest"),
    [
        (Access(), None, 200, 200),
        (Access(loopback=False), None, 200, 403),
        (Access("k"), None, 401, 401),
        (Access("k"), "k", 200, 403),
        (Access("k", "a"), "k", 200, 401),
        (Access("k", "a"), "a", 200, 200),
    ],
)
def test_who_may_see_what(
    make_server: Callable[..., ScriptedServer], access: Access, key: str | None, stats: int, slowest: int
) -> None:
    server = make_server(access=access)
    assert get(server, "/v1/stats", key).status_code == stats
    assert get(server, "/v1/requests/slowest", key).status_code == slowest


def test_a_failed_engine_says_so(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server()
    server.script.fail_at_step = 0
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=20)
    body = get(server, "/v1/stats").json()
    assert body["status"] == "dead"
    assert "scripted failure" in body["error"]
    assert get(server, "/v1/requests/slowest").status_code == 503
