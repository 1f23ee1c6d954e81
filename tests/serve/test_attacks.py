"""Attacks on a server in a process of its own. /health must answer throughout, and the attack must end as stated.

tests/bench/bench_attacks.py measures the same attacks against the strict bound.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import attacks
import pytest
from attacks import COMPLETIONS, Health, all_at_once, ask, closed, completion, idle_connections, one_byte_chunks
from fastapi import Response
from scripted import ScriptedServer, scripted_process

from llmsched.cli.serve.http_limits import HttpLimits

#: Bound of the 95th percentile on a busy machine. Before the limits, these attacks stalled /health for 2 to 30 s.
P95_S = 1.0

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    limits = {"header_timeout": 1.0, "body_timeout": 1.5, "keep_alive_timeout": 1.5}
    with scripted_process(max_queue_size=1 << 14, http=limits) as (_, url):
        yield url


def assert_lively(health: Health) -> None:
    assert set(health.statuses) == {200}, health.statuses
    assert health.at(0.95) < P95_S, sorted(health.seconds)[-5:]


def wait_until(condition: Callable[[], bool], patience_s: float = 20) -> bool:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# -- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nofile", [256, 1024])
def test_more_idle_connections_than_open_files(nofile: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        scripted_process(nofile=nofile, log=log) as (_, url),
        idle_connections(url, nofile + 150) as sockets,
        attacks.watched(url) as health,
    ):
        time.sleep(1)
        assert sum(map(closed, sockets)) >= 150
    assert_lively(health)
    assert len(log.read_text().splitlines()) <= 1


def test_new_connections_make_room_before_idle_ones() -> None:
    with scripted_process(http={"max_connections": 20}) as (_, url), attacks.connected(url) as kept:
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with idle_connections(url, 60) as sockets:
            assert wait_until(lambda: sum(map(closed, sockets)) >= 40)
            assert not closed(kept)


def test_with_all_connections_busy_others_get_503_and_probes_their_answer() -> None:
    busy = _post(completion(max_tokens=400, ignore_eos=True, stream=True))
    with scripted_process(0.5, http={"max_connections": 10}) as (_, url), idle_connections(url, 10, busy) as sockets:
        for each in sockets:
            assert each.recv(1 << 12).startswith(b"HTTP/1.1 200")
        status, headers, body = ask(url, COMPLETIONS, completion())
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "too_many_connections")
        assert ask(url, "/health")[0] == 200


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /health HTT", b"HTTP/1.1 408"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: b\r\n", b"HTTP/1.1 408"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{", b"HTTP/1.1 408"),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{",
            b"HTTP/1.1 408",
        ),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200"),
    ],
)
def test_parts_of_requests_have_deadlines(url: str, sent: bytes, answer: bytes) -> None:
    with idle_connections(url, 1, sent) as (each,):
        received = b""
        begun = time.monotonic()
        while part := each.recv(1 << 16):
            received += part
        assert received.startswith(answer)
        assert bool(received) == bool(answer)
        assert 0.5 < time.monotonic() - begun < 10


def test_a_client_that_sends_a_byte_now_and_then_gets_no_more_time(url: str) -> None:
    with idle_connections(url, 1, b"GET /health HTTP/1.1\r\n") as (each,):
        begun = time.monotonic()
        while not closed(each) and time.monotonic() - begun < 10:
            each.setblocking(True)
            try:
                each.sendall(b"A: b\r\n")
            except OSError:
                break
            time.sleep(0.1)
        assert time.monotonic() - begun < 8


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_takes_nothing_of_its_answer_is_cut_off(
    make_server: Callable[..., ScriptedServer], reads: bool
) -> None:
    server, size = make_server(http=HttpLimits(send_timeout=0.5)), 32 << 20
    server.app.add_api_route("/large", lambda: Response(b"x" * size))
    received = 0
    with attacks.connected(server.url) as each:
        each.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        for _ in range(15):
            time.sleep(0.1)
            received += len(each.recv(1 << 20)) if reads else 0
        with suppress(ConnectionError):
            while part := each.recv(1 << 20):
                received += len(part)
    assert (received > size) == reads


@pytest.mark.parametrize(
    "framing", ["Content-Length: 30\r\n\r\n%s", "Transfer-Encoding: chunked\r\n\r\n1e\r\n%s\r\n0\r\n\r\n"]
)
def test_an_offer_of_http2_is_ignored(url: str, framing: str) -> None:
    """Java's client offers it with its first request, and then sends the next one on the same connection."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    body = '{"prompt":"a", "max_tokens":1}'
    with idle_connections(url, 1) as (each,):
        for head in (offer, ""):
            each.sendall(POST + (head + framing % body).encode())
            answer = each.recv(1 << 16)
            while b"text_completion" not in answer:
                answer += each.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head", [b"A: " + b"x" * 40_000 + b"\r\n\r\n", b"A: b\r\n" * 9_000 + b"\r\n", b"A: " + b"x" * 999_999]
)
def test_large_heads_are_refused(url: str, head: bytes) -> None:
    with idle_connections(url, 1, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + head) as (each,):
        assert each.recv(1 << 16).startswith(b"HTTP/1.1 431")


# -- framing of bodies ------------------------------------------------------------------------------------------------


def test_one_byte_chunks(url: str) -> None:
    with attacks.watched(url) as health:
        assert all_at_once(8, lambda _: one_byte_chunks(url, 1_000_000)) == {400: 8}
    assert_lively(health)


@pytest.fixture(scope="module")
def locked_url() -> Iterator[str]:
    with scripted_process(access={"api_key": "secret"}) as (_, url):
        yield url


def test_one_byte_chunks_without_the_key(locked_url: str) -> None:
    begun = time.monotonic()
    with attacks.watched(locked_url) as health:
        assert all_at_once(32, lambda _: one_byte_chunks(locked_url, 1_000_000)) == {401: 32}
    assert_lively(health)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("path", [COMPLETIONS, "/reset_prefix_cache"])
def test_without_the_key_no_body_is_awaited(locked_url: str, path: str) -> None:
    request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n{{".encode()
    with idle_connections(locked_url, 1, request) as (each,):
        assert each.recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(url: str) -> None:
    with idle_connections(url, 1, POST + b"Content-Length: 80000000\r\n\r\n") as (each,):
        assert each.recv(1 << 16).startswith(b"HTTP/1.1 413")


# -- bursts -----------------------------------------------------------------------------------------------------------


def test_a_burst_beyond_the_queue_gets_429_exactly() -> None:
    """The engine is within its first step, so that the requests behind it wait; they are not more than the limit."""
    body = completion(max_tokens=1, stream=True)
    first = _post(completion(max_tokens=9, stream=True))
    with (
        scripted_process(5.0, max_queue_size=100, max_num_seqs=1, http={"max_connections": 400}) as (_, url),
        idle_connections(url, 1, first),
    ):
        time.sleep(1.0)
        answers = attacks.burst(url, 300, body)
    refused = [first for status, first in answers if status == 429]
    assert len(refused) == 200
    assert all(b"retry-after: " in first.lower() for first in refused)
    assert {status for status, _ in answers} == {200, 429}


def _post(body: bytes) -> bytes:
    return POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


# -- large requests ---------------------------------------------------------------------------------------------------

LARGE = {
    "long prompts": completion(prompt=["word " * 1520] * 1024),
    "prompts": completion(prompt=["word " * 90] * 1024),
    "token ids": b'{"prompt": [' + b"1," * 3_900_000 + b"1]}",
    "lists": b'{"prompt": [' + b"[1]," * 1_900_000 + b"[1]]}",
    "objects": b'{"prompt": [' + b"{}," * 2_500_000 + b"{}]}",
    "fields": b"{" + b",".join(b'"f%d":1' % i for i in range(700_000)) + b"}",
    "quotes": b'{"prompt": ["' + b'","' * 2_500_000 + b'"]}',
    "text": completion(prompt='a, [b] {"c": "d"} ' * 300_000),
    "messages": json.dumps({"messages": [{"role": "user", "content": ""}] * 100_000}).encode(),
}


@pytest.mark.parametrize("kind", LARGE)
def test_others_are_served_beside_large_requests(url: str, kind: str) -> None:
    path = "/v1/chat/completions" if kind == "messages" else COMPLETIONS
    small: list[float] = []
    with attacks.watched(url) as health, attacks.ThreadPoolExecutor(4) as pool:
        large = [pool.submit(ask, url, path, LARGE[kind]) for _ in range(4)]
        while not all(each.done() for each in large):
            begun = time.perf_counter()
            assert ask(url, COMPLETIONS, completion())[0] == 200
            small.append(time.perf_counter() - begun)
    assert {each.result()[0] for each in large} == {200 if kind == "prompts" else 400}
    assert_lively(health)
    assert sorted(small)[int(0.95 * len(small))] < 2 * P95_S, sorted(small)[-5:]
