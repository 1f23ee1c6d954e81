"""Connections: a complete request is answered, whatever the client sends after it, or if it sends nothing more."""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import attacks
import pytest
from scripted import ScriptedServer

from llmsched.cli.serve import connections
from llmsched.cli.serve.http_limits import HttpLimits


def post(streamed: bool = False, max_tokens: int = 3) -> bytes:
    body = attacks.completion(max_tokens=max_tokens, ignore_eos=True, stream=streamed)
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def answers(connection: socket.socket) -> list[tuple[int, str]]:
    """Read until the server closes the connection; return the status and the text of each completion or error."""
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    found = []
    for answer in re.split(rb"HTTP/1\.1 (?=\d{3} )", received)[1:]:
        status, (head, _, body) = int(answer[:3]), answer.partition(b"\r\n\r\n")
        events = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith((b"{", b"data: {"))]
        if b"text/event-stream" in head:
            # the comment is a ping to a client that has closed its side; it may fall between the last two writes
            assert re.search(rb"data: \[DONE\]\n\n\r\n(3\r\n:\n\n\r\n)?0\r\n\r\n\Z", body)
        if status != 100:
            contents = [json.loads(each) for each in events]
            found.append((status, "".join(each["choices"][0]["text"] for each in contents if "choices" in each)))
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "sequel",
    [
        b"nonsense\r\n\r\n",
        b"\0\1\2\3",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 40_000 + b"\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHo",
    ],
)
def test_a_request_followed_by_nonsense(
    make_server: Callable[..., ScriptedServer], sequel: bytes, streamed: bool
) -> None:
    server = make_server(http=HttpLimits(header_timeout=0.4, keep_alive_timeout=0.4))
    server.script.step_s = 0.2  # longer than the head may take, in all
    with attacks.connected(server.url) as connection:
        connection.sendall(post(streamed) + sequel)
        assert answers(connection)[0] == (200, "abc")


def test_a_client_that_is_behind_now_and_then_gets_everything_in_order(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.script, "step_s", 0.002)
    write_now, calls = connections._write_now, itertools.count()
    monkeypatch.setattr(connections, "_write_now", lambda *given: next(calls) % 3 > 0 and write_now(*given))
    with attacks.connected(server.url) as connection:
        connection.sendall(post(streamed=True, max_tokens=260).replace(b"localhost", b"localhost\r\nConnection: close"))
        assert answers(connection) == [(200, "abcdefghijklmnopqrstuvwxyz" * 10)]
    assert next(calls) > 3


def test_nothing_is_written_to_a_client_that_has_left(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would log a warning for each of the tokens that one turn of the event loop delivers."""
    write_now, written = connections._write_now, []

    def after_it_left(connection: connections.Connection, part: bytes) -> bool:
        connection.transport.abort()
        written.append(write_now(connection, part))
        return written[-1]

    monkeypatch.setattr(connections, "_write_now", after_it_left)
    monkeypatch.setattr(server.script, "step_s", 0.01)
    with attacks.connected(server.url) as connection:
        connection.sendall(post(streamed=True, max_tokens=200).replace(b"localhost", b"localhost\r\nConnection: close"))
        with suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass
    assert written
    assert not any(written)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("step_s", [0.0, 0.5])
def test_a_client_that_closes_only_its_own_side(
    server: ScriptedServer, streamed: bool, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.script, "step_s", step_s)
    with attacks.connected(server.url) as connection:
        connection.sendall(post(streamed))
        connection.shutdown(socket.SHUT_WR)
        begun = time.monotonic()
        assert answers(connection) == [(200, "abc")]
        assert time.monotonic() - begun < 4  # no wait for a client that has nothing more to send


@pytest.mark.parametrize(("last", "status"), [(post(max_tokens=1), 200), (post()[:-1], 400), (post()[:40], None)])
def test_requests_in_one_packet_before_the_client_closes_its_side(
    server: ScriptedServer, last: bytes, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.script, "step_s", 0.1)
    with attacks.connected(server.url) as connection:
        connection.sendall(post() + post(streamed=True) + last)
        connection.shutdown(socket.SHUT_WR)
        first, second, *more = answers(connection)
    assert first == second == (200, "abc")
    assert [each[0] for each in more] == [status] * (status is not None)


def test_an_incomplete_request_is_not_answered_after_the_client_closes_its_side(server: ScriptedServer) -> None:
    for sent in (b"", post()[:-1], post()[:40]):
        with attacks.connected(server.url) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert answers(connection) == []
