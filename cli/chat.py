from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.options.config_flags import EngineOptions, refuse_engine_options, with_engine_options
from llmsched.cli.quantities import server_url
from llmsched.cli.server_client import DEFAULT_URL, KeyOption, checked, server_client, valid_answers
from llmsched.cli.targets.sse import EventParser
from llmsched.engine.errors import LlmschedError, check_range

if TYPE_CHECKING:
    import httpx

_HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


#: Settings of the engine that matter to a chat with a model in this process.
_KNOBS = ("dtype", "quantization", "kv_cache_dtype", "device", "max_model_len", "gpu_memory_utilization")


@with_engine_options(only=(*_KNOBS, "kv_cache_memory_bytes", "model_impl"))
def chat(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL or URL",
            show_default=f"the server at {DEFAULT_URL}",
            help="http://HOST:PORT of a running server, or a model to load into this process.",
        ),
    ] = None,
    message: Annotated[
        str | None,
        typer.Option(
            "--message",
            "-m",
            help="One message; the command ends after its answer. Without it, messages are read from the terminal or "
            "a pipe.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=1 << 31, help="Most tokens of an answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Randomness, 0 to 2; 0 takes the most likely token.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help="LoRA adapter of the server that answers, not the model itself.")
    ] = None,
    api_key: KeyOption = None,
    *,
    engine_options: EngineOptions,
) -> None:
    """Chat with a model, or with the model of a running server. Answers appear as they are generated.

    With a MODEL, the command loads it, serves it to this process alone, and ends it with the chat. The options of the
    engine apply only then.

    \b
    Examples:
      llmsched chat
      llmsched chat demo
      llmsched chat demo -m "Name three rivers." --temperature 0
      llmsched chat http://gpu-box:8000 --system "Answer in French."
      llmsched chat http://gpu-box:8000 --adapter sql
    """
    if temperature is not None:
        check_range("temperature", temperature, 0 <= temperature <= 2, "0 to 2")
    options = {"max_tokens": max_tokens, "temperature": temperature, "model": adapter}
    fields = {name: value for name, value in options.items() if value is not None}
    start = [] if system is None else [{"role": "system", "content": system}]
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read()
    if message is not None and not message.strip():
        raise LlmschedError("the message is empty; give one with -m or on standard input")
    with _server(target, api_key, engine_options) as (url, key), server_client(url, key) as client:
        if message is None:
            _converse(client, start, fields)
        else:
            _answer(client, [*start, {"role": "user", "content": message}], fields)


@contextmanager
def _server(target: str | None, api_key: str | None, engine_options: EngineOptions) -> Iterator[tuple[str, str | None]]:
    """Yield the URL and the key of the server to talk to. If `target` is a model, start a server for it."""
    url = DEFAULT_URL if target is None else server_url(target)
    if target is None or url is not None:
        refuse_engine_options(engine_options)
        yield url or DEFAULT_URL, api_key
        return
    if any(map(str.isspace, target)) and not Path(target).exists():
        raise LlmschedError(f"{target!r} is neither a model nor a URL; to send it as a message, put -m before it")
    if api_key is not None:
        raise LlmschedError("--api-key only has an effect with the URL of a server; a model in this process needs none")
    from llmsched.cli.serve.private_server import private_server

    config = replace(engine_options.config(target), max_num_seqs=1)  # fewer sequences to reserve and warm up for
    with private_server(config) as served:
        yield served


def _converse(client: httpx.Client, start: list[dict[str, str]], fields: dict[str, Any]) -> None:
    with suppress(ImportError):  # Windows has no such module
        import readline  # noqa: F401  # lets `input` edit lines and recall earlier ones
    with valid_answers(client.base_url):
        checked(client.get("/v1/models"), "data")  # a wrong URL or key is told before the first message
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
    try:
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
    except LlmschedError:
        if first:
            render.say()  # the error must not follow the text on its line
        raise
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
    with (
        valid_answers(client.base_url),
        client.stream("POST", "/v1/chat/completions", json={**body, **options}) as response,
    ):
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
