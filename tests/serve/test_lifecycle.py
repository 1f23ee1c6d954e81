"""Drain, engine failure, signals, ports."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from scripted import ScriptedServer, scripted_process

from llmsched.cli.serve.lifecycle import PortInUseError, Server, listen
from llmsched.engine.recent_stats import RecentStats

PATH = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}
STREAM = {**LONG, "stream": True}


def events_of(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def test_idle_drain_ends_with_zero(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server()
    server.drain()
    assert server.join() == 0


def test_a_stream_may_finish_while_draining(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(grace_s=60.0)
    server.script.step_s = 0.05
    with httpx.stream("POST", server.url + PATH, json=STREAM) as answer:
        events = events_of(answer)
        next(events)
        server.script.gate.clear()
        server.drain()
        while (health := httpx.get(server.url + "/health", timeout=20)).status_code == 200:
            pass
        assert health.json() == {"status": "draining", "error": None}
        refused = httpx.post(server.url + PATH, json={"prompt": "x"}, timeout=20)
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        server.script.step_s = 0.0
        server.script.gate.set()
        assert list(events)[-1] == "[DONE]"
    assert server.join() == 0


def test_a_stream_that_does_not_finish_in_time_ends_with_an_error(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(grace_s=0.2)
    server.script.step_s = 0.05
    with httpx.stream("POST", server.url + PATH, json=STREAM, timeout=30) as answer:
        events = events_of(answer)
        next(events)
        server.drain()
        assert json.loads(list(events)[-1])["error"]["type"] == "service_unavailable_error"
    assert server.join() == 0


def test_whole_answers_that_do_not_finish_in_time_are_503(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(grace_s=0.2)
    server.script.step_s = 0.05
    threading.Timer(0.3, server.drain).start()
    assert httpx.post(server.url + PATH, json=LONG, timeout=30).status_code == 503
    assert server.join() == 0


def test_engine_failure(make_server: Callable[..., ScriptedServer], caplog: pytest.LogCaptureFixture) -> None:
    """Every client gets an error, /health fails, and the process exits with an error."""
    server = make_server()
    server.script.fail_at_step = 20
    server.script.step_s = 0.01
    statuses: list[int] = []
    waiting = threading.Thread(
        target=lambda: statuses.append(httpx.post(server.url + PATH, json=LONG, timeout=30).status_code)
    )
    waiting.start()
    with httpx.stream("POST", server.url + PATH, json=STREAM, timeout=30) as answer:
        events = list(events_of(answer))
    assert "scripted failure" in json.loads(events[-1])["error"]["message"]
    assert "[DONE]" not in events
    waiting.join()
    assert statuses == [503]
    health = httpx.get(server.url + "/health", timeout=30)
    assert (health.status_code, health.json()["status"]) == (503, "dead")
    assert httpx.post(server.url + PATH, json=LONG, timeout=30).status_code == 503
    assert server.join() == 1
    assert "the engine has failed" in caplog.text


def test_an_engine_that_fails_while_draining_ends_with_one(make_server: Callable[..., ScriptedServer]) -> None:
    server = make_server(grace_s=60.0)
    server.script.step_s = 0.05
    with httpx.stream("POST", server.url + PATH, json={**LONG, "stream": True}, timeout=30) as answer:
        events = events_of(answer)
        next(events)
        server.drain()
        while httpx.get(server.url + "/health", timeout=20).json()["status"] == "ok":
            pass
        server.script.fail_at_step = server.executor.steps
        assert "scripted failure" in json.loads(list(events)[-1])["error"]["message"]
    assert server.join() == 1


def test_sigterm_ends_a_process_whose_step_hangs() -> None:
    with (
        scripted_process(60) as (child, url),
        httpx.stream("POST", url + PATH, json=STREAM, timeout=30) as it,
    ):
        child.send_signal(signal.SIGTERM)
        assert json.loads(list(events_of(it))[-1])["error"]["type"] == "service_unavailable_error"
        assert child.wait(20) == 1, "grace 1 s, and a step of 60 s"


def test_a_second_signal_ends_at_once() -> None:
    with (
        scripted_process(60) as (child, url),
        httpx.stream("POST", url + PATH, json=STREAM, timeout=30),
    ):
        child.send_signal(signal.SIGINT)
        while httpx.get(url + "/health", timeout=30).status_code == 200:
            pass
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 128 + signal.SIGTERM


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port}: address already in use; choose another --port"):
            listen("127.0.0.1", port)


def test_the_second_server_on_a_port_is_refused_before_either_serves() -> None:
    with listen("127.0.0.1", 0)[0] as first, pytest.raises(PortInUseError, match="address already in use"):
        listen(*first.getsockname()[:2])


def test_a_client_that_connects_while_the_model_loads_is_served_afterwards() -> None:
    server = ScriptedServer()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.get, server.url + "/health", timeout=20)
        while not select.select([server.listeners[0]], [], [], 0.01)[0]:
            assert not answer.done()
        server.start()
        assert answer.result().status_code == 200
    server.close()


class FakeService:
    """The part of AsyncEngine that Server uses: healthy, and stopped at the end."""

    healthy = True
    stopped = False

    def __init__(self) -> None:
        self.recent = Mock(RecentStats)

    def diagnose(self) -> None:
        pass

    async def stop(self, timeout_s: float | None = None) -> bool:
        self.stopped = True
        return True


def served(listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Run a server to its end and check that the engine was stopped."""
    service = FakeService()
    try:
        server = Server(FastAPI(), service, grace_s=1.0, on_ready=on_ready)  # type: ignore[arg-type]
        asyncio.run(asyncio.wait_for(server.serve([listener]), 20))
    finally:
        assert service.stopped


def test_a_server_that_fails_while_serving_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()

    async def fail(self: uvicorn.Server) -> None:
        while not ready.is_set():
            await asyncio.sleep(0.01)
        raise RuntimeError("no more")

    monkeypatch.setattr(uvicorn.Server, "main_loop", fail)
    with listen("127.0.0.1", 0)[0] as listener, pytest.raises(RuntimeError, match="no more"):
        served(listener, ready.set)


def test_an_unknown_host_is_one_line() -> None:
    of_this_machine = "--host must be an address of this machine, such as 127.0.0.1"
    for host in ("", "256.0.0.1"):
        with pytest.raises(PortInUseError, match=rf"cannot listen on '{host}': .*; {of_this_machine}"):
            listen(host, 8000)
    with pytest.raises(PortInUseError, match=rf"192\.0\.2\.1:8000: cannot assign requested address; {of_this_machine}"):
        listen("192.0.2.1", 8000)  # reserved for documentation


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _, *rest, **more: [i for each in addresses for i in resolve(each, *rest, **more)]
    )


def test_all_addresses_of_a_name_are_served_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "::1", "127.0.0.1", "::1")
    listeners = listen("localhost", 0)
    names = [listener.getsockname()[:2] for listener in listeners]
    assert names == [("127.0.0.1", names[0][1]), ("::1", names[0][1])]
    server = ScriptedServer()
    server.listeners += listeners
    server.start()
    for host in ("127.0.0.1", "[::1]"):
        assert httpx.get(f"http://{host}:{names[0][1]}/health", timeout=20).status_code == 200
    server.close()


@pytest.mark.parametrize("missing", ["192.0.2.1", "2001:db8::1"])  # reserved for documentation
def test_an_address_that_the_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    resolve_to(monkeypatch, missing, "127.0.0.1")
    with listen("localhost", 0)[0] as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_port_that_one_address_of_a_name_cannot_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("::1", 0)[0] as other:
        resolve_to(monkeypatch, "127.0.0.1", "::1")
        with pytest.raises(PortInUseError, match="address already in use"):
            listen("localhost", other.getsockname()[1])


def test_an_ipv6_address_may_have_brackets() -> None:
    with listen("[::1]", 0)[0] as listener:
        assert listener.getsockname()[0] == "::1"
