"""Attacks on a running server, and a probe that measures how fast /health answers meanwhile."""

from __future__ import annotations

import http.client
import json
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

COMPLETIONS = "/v1/completions"


@dataclass
class Health:
    """Answers of /health during an attack: the duration of each, and the counts of statuses or names of exceptions."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[Any] = field(default_factory=Counter)

    def at(self, share: float) -> float:
        """Return a quantile of the durations in seconds; `share` 0.5 is the median, and 1 the maximum."""
        times = sorted(self.seconds)
        return times[min(len(times) - 1, int(share * len(times)))]


@contextmanager
def watched(url: str) -> Iterator[Health]:
    """Ask for /health on new connections until the block ends, in another process, which the attack does not slow."""
    health = Health()
    watcher = subprocess.Popen(
        [sys.executable, __file__, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "ready\n"
    try:
        yield health
    finally:
        for outcome, seconds in json.loads(watcher.communicate("stop")[0]):
            health.statuses[outcome] += 1
            health.seconds.append(seconds)


def watch(url: str, every_s: float = 0.02) -> None:
    """Ask for /health every `every_s` seconds until stdin is closed, and at least 5 times; print the outcomes."""
    outcomes: list[tuple[Any, float]] = []
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], every_s)[0] or len(outcomes) < 5:
        begun = time.perf_counter()
        try:
            outcome: Any = ask(url, "/health", timeout=30)[0]
        except OSError as error:
            outcome = type(error).__name__
        outcomes.append((outcome, time.perf_counter() - begun))
    print(json.dumps(outcomes))


def ask(
    url: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, timeout: float = 60
) -> tuple[int, dict[str, str], bytes]:
    """Send a GET or, with a `body`, a POST. Return the status, the headers and the body of the answer."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=timeout)
    try:
        kind = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, kind | (headers or {}))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def connected(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((str(place.hostname), place.port or 80), timeout=30)


@contextmanager
def idle_connections(url: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Yield `count` open connections that have sent nothing but `sent`."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            with suppress(OSError):
                sockets.append(connected(url))
                sockets[-1].sendall(sent)
        yield sockets
    finally:
        for each in sockets:
            each.close()


def closed(each: socket.socket) -> bool:
    """Return True if the server has closed the connection."""
    each.setblocking(False)
    try:
        return not each.recv(1 << 16) or closed(each)
    except BlockingIOError:
        return False
    except OSError:
        return True


def one_byte_chunks(url: str, count: int, path: str = COMPLETIONS) -> int | str:
    """POST a body in `count` chunks of one byte. Return the status of the answer, or the name of an exception."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with connected(url) as sender:
        pieces = b"1\r\n \r\n" * 10_000
        with suppress(OSError):
            sender.sendall(head)
            for _ in range(count // 10_000):
                sender.sendall(pieces)
            sender.sendall(b"0\r\n\r\n")
        try:
            return int(sender.recv(1 << 16).split(b" ", 2)[1])
        except (OSError, IndexError) as error:
            return type(error).__name__


def all_at_once(count: int, attack: Callable[[int], Any]) -> Counter[Any]:
    """Call `attack` in `count` threads at once. Count its results, or the names of its OSErrors."""

    def outcome(number: int) -> Any:
        try:
            return attack(number)
        except OSError as error:
            return type(error).__name__

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(outcome, range(count)))


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode()


def burst(url: str, count: int, body: bytes) -> list[tuple[int, bytes]]:
    """Send `count` streaming requests on as many connections, then read the start of each answer.

    Return the status and the first bytes of each answer.
    """
    place = urlsplit(url)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sockets = [connected(url) for _ in range(count)]
    try:
        for each in sockets:
            each.sendall(head + body)
        answers = []
        for each in sockets:
            each.settimeout(30)
            first = each.recv(1 << 16)
            answers.append((int(first.split(b" ", 2)[1]), first))
        return answers
    finally:
        for each in sockets:
            each.close()


if __name__ == "__main__":
    watch(sys.argv[1])
