"""`llmsched top` against a live server: one document, one screen, or a line for each query."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from command_line import CommandLine
from scripted import LiveServer, ScriptedServer

from llmsched.cli.live_stats import status_line
from llmsched.cli.serve.access import Access
from llmsched.engine.build import build_engine
from llmsched.engine.config import EngineConfig


def complete(server: ScriptedServer, prompt: str = "a") -> None:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": "Bearer k"})
    assert answer.status_code == 200


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(access=Access("k", "a")).start()
    for prompt in ("a b c d " * 20, "a b c d " * 20, "x"):
        complete(server, prompt)
    yield server
    server.close()


@pytest.fixture
def fresh_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer().start()
    yield server
    server.close()


def make_terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> None:
    """Make stdout a terminal. Call this in the test itself, because pytest replaces stdout after fixtures have run."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(columns)), ("LINES", "50")):
        monkeypatch.setenv(name, value)


def interrupted_after(monkeypatch: pytest.MonkeyPatch, looks: int, meanwhile: Callable[[], None] = print) -> None:
    """Let the pauses take no time, and Ctrl-C be pressed after some of them. Call `meanwhile` in the first pause."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            meanwhile()
        if len(pauses) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)


def test_json_is_what_the_routes_answer(command: CommandLine, server: ScriptedServer) -> None:
    found = command("top", server.url, "--json", "--api-key", "a").json
    with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer a"}) as http:
        stats, slowest = http.get("/v1/stats").json(), http.get("/v1/requests/slowest").json()["data"]
    assert [each["id"] for each in found.pop("slowest_requests")] == [each["id"] for each in slowest]
    assert found.pop("slowest_refused") is None
    for moving in ("uptime_s", "window_s", "output_tokens_per_s"):
        assert isinstance(found.pop(moving), float)
        del stats[moving]
    assert found == stats


def test_one_screen(command: CommandLine, server: ScriptedServer) -> None:
    outcome = command("top", server.url, "--once", "--api-key", "a")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"scripted at {server.url}: ok, up for ")
    assert (
        lines[1]
        == "requests      0 of at most 8 running, 0 waiting; 3 completed, 0 failed, 0 abandoned, 0 past their deadline"
    )
    bar = lines[3].split()[2]
    assert len(bar) == 60
    assert set(bar) == {"▒", "░"}
    assert "requests by result: hit 1, too short 1, cold 1" in outcome.out
    assert re.search(r"TTFT +[\d.]+ m?s +[\d.]+ m?s +[\d.]+ m?s", outcome.out)
    assert len(re.findall(r"^cmpl-\w+ +length ", outcome.out, re.MULTILINE)) == 3


def test_the_slowest_requests_are_for_administrators(command: CommandLine, server: ScriptedServer) -> None:
    told = command("top", server.url, "--once", "--api-key", "k").out
    assert "slowest       not shown: the key for administrative routes" in told
    assert "cmpl-" not in told
    found = command("top", server.url, "--json", "--api-key", "k").json
    assert found["slowest_requests"] is None
    assert "administrative" in found["slowest_refused"]


def test_a_line_for_each_look(command: CommandLine, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_after(monkeypatch, 3)
    outcome = command("top", server.url, "--api-key", "k", "--interval", "5s")
    assert outcome.code == 0
    lines = [line for line in outcome.out.splitlines() if line]
    stats = httpx.get(server.url + "/v1/stats", headers={"Authorization": "Bearer k"}).json()
    assert len(lines) == 3
    for line in lines:
        date, clock, *rest = line.split(" ")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", f"{date} {clock}")
        told, expected = " ".join(rest).split(" | "), status_line(stats).split(" | ")
        assert [told[0], *told[2:]] == [expected[0], *expected[2:]]


def test_a_terminal_is_filled_again_and_again(
    command: CommandLine, fresh_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_server
    interrupted_after(monkeypatch, 2, partial(complete, server))
    make_terminal(monkeypatch)
    outcome = command("top", server.url)
    assert (outcome.code, outcome.err) == (0, "")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", outcome.out)
    assert shown.index("0 completed") < shown.index("1 completed")
    assert shown.index("1 completed") < shown.index("cmpl-")
    assert "\x1b[?1049h" in outcome.out  # the alternate screen is entered
    assert outcome.out.index("\x1b[?1049l") > outcome.out.rindex("scripted at ")  # and left


def test_a_model_without_kv_blocks(
    command: CommandLine, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_model("mamba2")), dtype="float32", device="cpu", max_num_seqs=2)
    server = LiveServer(build_engine(config), name="m").start()
    try:
        assert "KV blocks     none: all layers of the model are recurrent\n" in command("top", server.url, "--once").out
        interrupted_after(monkeypatch, 1)
        line = command("top", server.url)
    finally:
        server.close()
    assert (line.code, line.err) == (0, "")
    assert "0 waiting | 0.00 tokens/s" in line.out
    assert "KV" not in line.out


def test_a_narrow_terminal_has_a_line_for_each_slow_request(
    command: CommandLine, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_terminal(monkeypatch, 80)
    lines = re.sub(
        r"\x1b\[[0-9;?]*[a-zA-Z]", "", command("top", server.url, "--once", "--api-key", "a").out
    ).splitlines()
    assert sum("cmpl-" in line and " ago" in line for line in lines) == 3
    assert max(map(len, lines)) <= 80


def test_a_terminal_is_restored_at_sigterm(
    command: CommandLine, fresh_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guard(number: int, _: object) -> None:  # the default handler would end the tests
        pytest.fail("the command does not handle SIGTERM")

    make_terminal(monkeypatch)
    before = signal.signal(signal.SIGTERM, guard)
    try:
        interrupted_after(monkeypatch, 2, partial(signal.raise_signal, signal.SIGTERM))
        outcome = command("top", fresh_server.url)
        assert signal.getsignal(signal.SIGTERM) is guard
    finally:
        signal.signal(signal.SIGTERM, before)
    assert outcome.code == 128 + signal.SIGTERM
    assert outcome.out.index("\x1b[?1049l") > outcome.out.rindex("scripted at ")


def test_a_server_that_goes_away_is_waited_for(
    command: CommandLine, fresh_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fresh_server
    interrupted_after(monkeypatch, 3, server.close)
    outcome = command("top", server.url)
    assert outcome.code == 0
    assert outcome.out.count("0 running") == 1
    assert outcome.err.count(f"warning: no valid answer from an llmsched server at {server.url}") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--api-key", "wrong"), "the API key is missing or wrong"),
        (("--interval", "1ms"), "--interval: 0.001 is out of range; allowed is 0.1s or more"),
    ],
)
def test_a_failure_is_one_line(
    command: CommandLine, server: ScriptedServer, arguments: tuple[str, ...], message: str
) -> None:
    assert message in command.refused("top", server.url, *arguments)


def test_no_server(command: CommandLine) -> None:
    told = command.refused("top", "http://127.0.0.1:9", "--once")
    assert "no valid answer from an llmsched server at http://127.0.0.1:9" in told
    assert told.endswith("; `llmsched serve` starts a server")
