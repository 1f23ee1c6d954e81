from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.server_client import DEFAULT_URL, KeyOption, UrlOption, checked, server_client
from llmsched.cli.targets.sse import EventParser
from llmsched.engine.errors import LlmschedError, check_range

if TYPE_CHECKING:
    import httpx

_HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def chat(
    message: Annotated[
        str | None,
        typer.Argument(help="One message, for one answer. Without it, messages are read from the terminal or a pipe."),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=1 << 31, help="Most tokens of an answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Randomness, 0 to 2; 0 takes the most likely token.")
    ] = None,
    api_key: KeyOption = None,
) -> None:
    """Talk to the model of a running server. Answers appear as they are generated.

    \b
    Examples:
      llmsched chat
      llmsched chat "Name three rivers." --temperature 0
      llmsched chat --url http://gpu-box:8000 --system "Answer in French."
    """
    if temperature is not None:
        check_range("temperature", temperature, 0 <= temperature <= 2, "0 to 2")
    options = {"max_tokens": max_tokens, "temperature": temperature}
    fields = {name: value for name, value in options.items() if value is not None}
    start = [] if system is None else [{"role": "system", "content": system}]
    with server_client(url, api_key) as client:
        if message is None and sys.stdin.isatty():
            _converse(client, start, fields)
            return
        text = sys.stdin.read() if message is None else message
        if not text.strip():
            raise LlmschedError("the message is empty; give one as an argument or on standard input")
        _answer(client, [*start, {"role": "user", "content": text}], fields)


def _converse(client: httpx.Client, start: list[dict[str, str]], fields: dict[str, Any]) -> None:
    render.note(_HELP)
    history = list(start)
    while True:
        try:
            text = input("> ")
        except EOFError:
            render.say()
            return
        match text.strip():
            case "":
                continue
            case "/exit":
                return
            case "/clear":
                history = list(start)
                continue
        history.append({"role": "user", "content": text})
        try:
            history.append({"role": "assistant", "content": _answer(client, history, fields)})
            continue
        except KeyboardInterrupt:  # the server frees the request when the connection closes
            render.say()
        except LlmschedError as problem:  # for example, the conversation exceeds the context
            render.error(problem.message)
        history.pop()


def _answer(client: httpx.Client, messages: list[dict[str, str]], fields: dict[str, Any]) -> str:
    started, first = time.perf_counter(), 0.0
    parts: list[str] = []
    usage: dict[str, int] = {}
    is_reasoning = False
    for chunk in _stream(client, {"messages": messages, **fields}):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            if reasoning := choice["delta"].get("reasoning_content"):
                first = first or time.perf_counter() - started
                is_reasoning = True
                render.write(reasoning)
            if content := choice["delta"].get("content"):
                first = first or time.perf_counter() - started
                render.write("\n\n" * is_reasoning + content)
                is_reasoning = False
                parts.append(content)
    render.say()
    if sys.stdout.isatty() and usage:
        tokens, wait = usage["completion_tokens"], time.perf_counter() - started
        speed = f", {(tokens - 1) / (wait - first):.3g} tokens/s" if tokens > 1 else ""
        render.note(f"{tokens} tokens, first after {render.human_seconds(first)}{speed}")
    return "".join(parts)


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import json

    parser = EventParser()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json={**body, **options}) as response:
        if response.status_code != 200:
            response.read()
            checked(response, "choices")
        for received in response.iter_bytes():
            for event in parser.feed(received):
                if event.data == "[DONE]":
                    return
                chunk = json.loads(event.data)
                if "error" in chunk:
                    raise LlmschedError(chunk["error"]["message"])
                yield chunk
    raise LlmschedError("the server ended the answer early")
