"""`llmsched chat` against a live server: one answer, or a conversation on a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from command_line import CommandLine
from scripted import EOS, MODEL, ScriptedServer
from tool_templates import THINKING_TEMPLATE

from llmsched.cli import chat
from llmsched.cli.serve.access import Access
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import LlmschedError
from llmsched.engine.request import Sequence

pytestmark = pytest.mark.usefixtures("client_key")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(access=Access("k")).start()
    yield server
    server.close()


@pytest.fixture
def prompts(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the text of every prompt is added that the server answers."""
    seen: list[str] = []
    script: Any = server.engine.executor.script  # type: ignore[attr-defined]
    next_token = script.next_token

    def noted(sequence: Sequence) -> int:
        if sequence.num_output_tokens == 0:
            seen.append(server.tokenizer.decode(sequence.token_ids, skip_special_tokens=True))
        return int(next_token(sequence))

    monkeypatch.setattr(script, "next_token", noted)
    return seen


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make stdin a terminal on which these lines are typed."""
    typed = iter(lines)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))


def test_one_message(command: CommandLine, server: ScriptedServer) -> None:
    short = command("chat", server.url, "-m", "Hello", "--max-tokens", "3", "--temperature", "0")
    long = command("chat", server.url + "/v1/", "-m", "Hello", "--max-tokens", "6", "--temperature", "0")
    assert (short.code, short.err) == (0, "")
    assert long.out.startswith(short.out.rstrip("\n"))
    assert len(long.out) > len(short.out) > 1
    named = command("chat", server.url, "-m", "Hello", "--max-tokens", "3", "--temperature", "0", "--adapter", MODEL)
    assert named.out == short.out


def test_reasoning_is_shown_before_the_answer(command: CommandLine) -> None:
    server = ScriptedServer(chat_template=THINKING_TEMPLATE).start()
    try:
        server.script.alphabet = [*server.ids("Hm.</think>Yes."), EOS]
        assert command("chat", server.url, "-m", "Hello").out == "Hm.\n\nYes.\n"
    finally:
        server.close()


def test_a_message_from_a_pipe(command: CommandLine, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    piped = command("chat", server.url, "--max-tokens", "3", "--temperature", "0")
    assert piped.out == command("chat", server.url, "-m", "Hello", "--max-tokens", "3", "--temperature", "0").out
    monkeypatch.setattr(sys, "stdin", io.StringIO(" "))
    assert command("chat", server.url).code == 2


def test_a_conversation_remembers_until_it_is_cleared(
    command: CommandLine, server: ScriptedServer, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "first", "", "second", "/clear", "third", "/exit")
    outcome = command("chat", server.url, "--system", "sys", "--max-tokens", "3")
    assert outcome.code == 0
    answers = [line for line in outcome.out.splitlines() if line]
    assert len(answers) == len(prompts) == 3
    assert [["first" in prompt, "second" in prompt, "third" in prompt] for prompt in prompts] == [
        [True, False, False],
        [True, True, False],
        [False, False, True],
    ]
    assert answers[0] in prompts[1]
    assert all("sys" in prompt for prompt in prompts)


def test_a_refused_message_is_forgotten_and_the_conversation_goes_on(
    command: CommandLine, server: ScriptedServer, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "long " * 10_000, "short", "/exit")
    outcome = command("chat", server.url, "--max-tokens", "3")
    assert outcome.code == 0
    assert "error: the context of this server is" in outcome.err
    assert len(prompts) == 1
    assert "long" not in prompts[0]


def test_an_answer_that_fails_ends_its_line(
    command: CommandLine, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Iterator[dict[str, Any]]:
        yield {"choices": [{"delta": {"content": "half an ans"}}]}
        raise LlmschedError("the server is gone")

    monkeypatch.setattr(chat, "_stream", broken)
    outcome = command("chat", server.url, "-m", "Hello")
    assert (outcome.code, outcome.out) == (2, "half an ans\n")
    assert outcome.err == "error: the server is gone\n"


@pytest.mark.parametrize("arguments", [("URL", "--api-key", "wrong"), ("http://127.0.0.1:9",)])
def test_a_conversation_does_not_begin_with_a_wrong_server_or_key(
    command: CommandLine, server: ScriptedServer, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch)
    command.refused("chat", *(server.url if argument == "URL" else argument for argument in arguments))


def test_a_conversation_goes_on_when_the_connection_breaks(
    command: CommandLine, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([httpx.ReadError("the peer closed the connection")])
    stream = httpx.Client.stream

    def broken_once(self: httpx.Client, *arguments: Any, **options: Any) -> Any:
        if problem := next(answers, None):
            raise problem
        return stream(self, *arguments, **options)

    monkeypatch.setattr(httpx.Client, "stream", broken_once)
    type_lines(monkeypatch, "first", "second", "/exit")
    outcome = command("chat", server.url, "--max-tokens", "3")
    assert outcome.code == 0
    assert f"error: no valid answer from an llmsched server at {server.url}: the peer closed" in outcome.err
    assert len(outcome.out.split()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("URL", "--api-key", "wrong"), "key"),
        (("http://127.0.0.1:9",), "no valid answer from an llmsched server at http://127.0.0.1:9"),
        (("URL", "--max-tokens", "1000000"), "max_tokens"),
        (("URL", "--adapter", "sql"), "model 'sql' is not served here"),
        (("URL", "--dtype", "float32"), "--dtype: the settings of a running server cannot be changed from here"),
        (("--device", "cpu"), "--device: the settings of a running server cannot be changed from here"),
        (("Hello there",), "'Hello there' is neither a model nor a URL; to send it as a message, put -m before it"),
        (("demo", "--api-key", "k"), "--api-key only has an effect with the URL of a server"),
    ],
)
def test_a_failure_is_one_line(
    command: CommandLine, server: ScriptedServer, arguments: tuple[str, ...], message: str
) -> None:
    filled = [server.url if argument == "URL" else argument for argument in arguments]
    assert message in command.refused("chat", *filled, "-m", "Hello")


def build_scripted(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Make `build_engine` return a scripted engine. Return a list to which the configs are added."""
    scripted = ScriptedServer()
    for listener in scripted.listeners:
        listener.close()
    built: list[EngineConfig] = []

    def build(config: EngineConfig, _: object) -> Engine:
        built.append(config)
        return scripted.engine

    monkeypatch.setattr("llmsched.engine.build.build_engine", build)
    return built


def test_a_model_is_served_to_this_process_alone(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_scripted(monkeypatch)
    seen: list[tuple[str, str | None]] = []
    server_client = chat.server_client

    def noted(url: str, key: str | None) -> Any:
        seen.append((url, key))
        assert httpx.get(f"{url}/v1/models").status_code == 401
        return server_client(url, key)

    monkeypatch.setattr(chat, "server_client", noted)
    outcome = command("chat", "some-model", "-m", "Hello", "--max-tokens", "3", "--dtype", "float32")
    assert (outcome.code, outcome.out) == (0, "abc\n")
    assert built == [EngineConfig(model="some-model", dtype="float32", max_num_seqs=1)]
    ((url, _),) = seen
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_server_that_cannot_start_is_an_error(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LlmschedError("no server today")

    build_scripted(monkeypatch)
    monkeypatch.setattr("llmsched.cli.serve.private_server.build_app", fail)
    assert "no server today" in command.refused("chat", "some-model", "-m", "Hello")
