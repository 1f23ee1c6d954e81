"""Clients that disconnect: their requests end, whatever state they are in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from scripted import ScriptedServer

from llmsched.engine.request import FinishReason

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 480, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", **LONG},
    CHAT: {"messages": [{"role": "user", "content": "hello"}], **LONG},
}


@pytest.fixture
def server(make_server: Callable[..., ScriptedServer]) -> Iterator[ScriptedServer]:
    """One request of 480 tokens takes several seconds; two run at a time."""
    server = make_server(max_num_seqs=2)
    server.script.step_s = 0.01
    yield server
    assert until(lambda: server.service.stats().num_running + server.service.stats().num_waiting == 0)
    assert until(lambda: not server.service._streams)
    server.script.gate.set()
    server.engine.check_integrity()


def until(condition: Callable[[], bool], patience_s: float = 20) -> bool:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def running(server: ScriptedServer, count: int) -> Callable[[], bool]:
    return lambda: server.service.stats().num_running == count


def aborted(server: ScriptedServer) -> int:
    return server.service.stats().finished[FinishReason.ABORT]


class Leaver:
    """Client in a thread that closes its connection on request."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)
        self._path, self._body = path, body
        self._connection: list[Any] = []
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        def note(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                self._connection.append(info["return_value"])

        try:
            self._client.post(self._path, json=self._body, extensions={"trace": note})
        except (httpx.TransportError, OSError):
            return

    def leave(self) -> None:
        stream = self._connection[0]
        stream._sock.shutdown(2)
        self._thread.join()
        self._client.close()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_while_it_generates(server: ScriptedServer, path: str, streamed: bool, n: int) -> None:
    client = Leaver(server.url, path, {**BODIES[path], "stream": streamed, "n": n})
    assert until(running(server, n))
    client.leave()
    assert until(running(server, 0))
    assert aborted(server) == n
    assert server.service.stats().generation_tokens < 480
    assert server.service.stats().blocks_used == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_while_it_waits(server: ScriptedServer, streamed: bool) -> None:
    first = Leaver(server.url, COMPLETIONS, {**BODIES[COMPLETIONS], "n": 2})
    assert until(running(server, 2))
    second = Leaver(server.url, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": streamed})
    assert until(lambda: server.service.stats().num_waiting == 1)
    second.leave()
    assert until(lambda: server.service.stats().num_waiting == 0)
    assert aborted(server) == 1
    first.leave()


def test_while_its_prompt_is_computed(server: ScriptedServer) -> None:
    server.script.step_s = 0.2
    client = Leaver(server.url, COMPLETIONS, {"prompt": [10] * 500, "max_tokens": 1, "stream": True})
    assert until(running(server, 1))
    client.leave()
    assert until(running(server, 0))
    assert server.service.stats().generation_tokens == 0


def test_with_several_prompts(server: ScriptedServer) -> None:
    client = Leaver(server.url, COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": ["a", "b", "c"]})
    assert until(lambda: server.service.stats().num_waiting == 1)
    client.leave()
    assert until(lambda: aborted(server) == 3)


def test_gauges_are_zero_without_further_traffic(server: ScriptedServer) -> None:
    clients = [Leaver(server.url, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True}) for _ in range(8)]
    assert until(lambda: server.service.stats().num_waiting == 6)
    for client in clients:
        client.leave()
    assert until(lambda: aborted(server) == 8)
    lines = server.engine.metrics.render().decode().splitlines()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [values[f"llmsched:{name}"] for name in gauges] == [0, 0, 0]
    assert any('finished_reason="abort"' in line and line.endswith(" 8.0") for line in lines)


def test_storm_of_connections_that_close_at_once(server: ScriptedServer) -> None:
    def flash(delay: float) -> None:
        with httpx.Client(base_url=server.url, timeout=delay) as http, suppress(httpx.TransportError):
            http.post(COMPLETIONS, json={"prompt": "word " * 400, "max_tokens": 60, "n": 8})

    threads = [threading.Thread(target=flash, args=(0.0005 * (1 + i % 20),)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert until(lambda: not server.service._streams)
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "hello", "max_tokens": 1}).status_code == 200
