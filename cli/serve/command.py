from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from llmsched.cli import render
from llmsched.cli.cluster.cluster_flags import ClusterFlags
from llmsched.cli.options.config_flags import EngineOptions, with_engine_options
from llmsched.cli.options.flags import (
    ModelArgument,
    duration_option,
    flag,
    resolve_model,
    typed_options,
    with_options,
)
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.engine.errors import ConfigError, setting

if TYPE_CHECKING:
    from collections.abc import Collection

    from llmsched.cli.serve.access import Access
    from llmsched.cli.serve.api_keys import KeyFile
    from llmsched.cli.serve.request_log import RequestObserver
    from llmsched.engine.config import EngineConfig
    from llmsched.engine.core import Engine

ToolCallParser = Literal[
    "auto",
    "hermes",
    "llama3_json",
    "pythonic",
    "mistral",
    "qwen3_coder",
    "harmony",
    "deepseek_v3",
    "deepseek_v31",
    "none",
]
ReasoningParser = Literal["auto", "think", "mistral", "none"]


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Flags of `llmsched serve`, except those in EngineOptions and HttpLimits. Times are in seconds."""

    host: Annotated[str, typer.Option(help="Address or host name to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks any free port.")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="LLMSCHED_API_KEY",
            help="Key that clients must send as 'Authorization: Bearer KEY'; /health, /ready and /metrics need no key.",
        ),
    ] = None
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="LLMSCHED_ADMIN_API_KEY",
            help="Key for the routes that show or change what all clients share: /v1/cache, /v1/prefixes, "
            "/v1/requests/slowest and /reset_prefix_cache. Without it they work only on a loopback address and without "
            "--api-key.",
        ),
    ] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="LLMSCHED_API_KEYS",
            help="File of named keys with budgets per minute: TOML with [[keys]] tables (name; key or hash; "
            "requests_per_minute, tokens_per_minute, admin), or one JSON object per line. SIGHUP reads it again.",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name besides localhost that a server on a loopback address without --api-key accepts in the "
            "headers Host and Origin, for example a proxy's; * accepts all. Repeatable.",
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        typer.Option(
            metavar="ORIGIN,...",
            help="Origins of web pages that may call the server from a browser (CORS), such as "
            "https://chat.example,http://localhost:3000; * allows all.",
        ),
    ] = None
    ui: Annotated[
        bool,
        typer.Option("--ui/--no-ui", help="Serve a page at / for browsers, with a chat and live figures."),
    ] = True
    show_prompt_text: Annotated[
        bool,
        typer.Option(
            "--show-prompt-text",
            help="Quote the prompts when the log and /v1/cache report prompts that never hit the prefix cache.",
        ),
    ] = False
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name of the model in requests and answers.", show_default="MODEL"),
    ] = None
    tool_call_parser: Annotated[
        ToolCallParser,
        typer.Option(help="Notation in which the model writes tool calls; auto asks its chat template."),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        typer.Option(
            help="Texts around reasoning, which answers have in reasoning_content: think is <think> and </think>, "
            "mistral is [THINK] and [/THINK], none leaves reasoning in the content; auto asks the chat template."
        ),
    ] = "auto"
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="Settings saved by `llmsched tune`; flags override them."),
    ] = None
    pin_prefix: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Pin the beginning of prompts in the prefix cache: a text file, or a .json file with the body of a "
            "POST to /v1/prefixes (chat messages, for example). Repeatable.",
        ),
    ] = None
    grace_period: Annotated[
        float,
        duration_option(
            "Time that running requests get to finish after SIGTERM or Ctrl-C. The process exits at most 2s later.",
        ),
    ] = 30.0
    step_timeout: Annotated[
        float,
        duration_option(
            "Time without a finished step, while requests wait, after which /health answers 503; 0 turns this off. A "
            "full step must take less time: a large model on a slow CPU needs minutes.",
        ),
    ] = 300.0
    status_interval: Annotated[
        float,
        duration_option("Time between two status lines in the log while there is traffic; 0 logs none."),
    ] = 10.0
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="Form of the log on stderr: lines of text, or one JSON object per line."),
    ] = "text"
    log_requests: Annotated[
        bool | None,
        typer.Option(
            "--log-requests/--no-log-requests",
            help="Log a line when a request ends: its id, tokens, prefix hit, TTFT, P99 ITL, preemptions and finish "
            "reason. On by default with --log-format json.",
            show_default=False,
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="OpenTelemetry collector (OTLP over HTTP, such as http://localhost:4318) that gets a trace of every "
            "request; needs pip install 'llmsched[otel]'.",
        ),
    ] = None
    metrics_prefix: Annotated[str, typer.Option(help="Prefix of metric names; vllm keeps vLLM dashboards working.")] = (
        "llmsched"
    )


@with_engine_options(
    uses={"lora": "requests choose it by model: NAME; repeatable, and one batch may use several adapters"}
)
@with_options("limits", HttpLimits)
@with_options("cluster", ClusterFlags)
@with_options("flags", ServerFlags)
def serve(
    context: typer.Context,
    model: ModelArgument = None,
    *,
    flags: ServerFlags,
    cluster: ClusterFlags,
    limits: HttpLimits,
    engine_options: EngineOptions,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API.

    \b
    Examples:
      llmsched serve demo
      llmsched serve Qwen/Qwen3-8B --host 0.0.0.0 --api-key secret
      llmsched serve ./model --max-model-len 8192 --max-num-batched-tokens 512
      llmsched serve demo --profile demo
      llmsched serve demo --pin-prefix system_prompt.json
      llmsched serve ./model --replicas 4
      llmsched serve ./model --lora sql=./sql-adapter --lora chat=./chat-adapter

    \b
    Then open http://127.0.0.1:8000 in a browser, talk to it with `llmsched chat`, or:
      curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """
    from llmsched.cli.profiles.apply import profile_warnings, store_ratios, with_profile
    from llmsched.cli.serve.access import Access, are_loopback, checked_key
    from llmsched.cli.serve.api_keys import KeyFile
    from llmsched.cli.serve.detached_output import detached_output
    from llmsched.cli.serve.lifecycle import favour_latency, listen
    from llmsched.cli.serve.middleware import read_origins
    from llmsched.cli.serve.prefix_routes import pin_prefixes, read_prefixes
    from llmsched.engine.metrics import check_prefix

    if flags.log_format == "json":
        render.show_log(as_json=True)
    keys = checked_key("api_key", flags.api_key), checked_key("admin_api_key", flags.admin_api_key)
    key_file = None if flags.api_keys is None else KeyFile(flags.api_keys)
    if flags.served_model_name == "":
        raise ConfigError("served_model_name", "is empty; give a name, or leave the option out for the model's own")
    check_prefix(flags.metrics_prefix)
    origins = read_origins(flags.cors_origins)
    config = with_profile(engine_options, flags.profile).config(resolve_model(model))
    for warning in profile_warnings(flags.profile, config) if flags.profile else ():
        render.warn(warning)
    if flags.pin_prefix and not config.enable_prefix_caching:
        raise ConfigError(
            "pin_prefix", f"nothing can be pinned with {setting('enable_prefix_caching')} off; leave one of them out"
        )
    cluster.check(typed_options(context))
    if cluster.replicas is not None:
        _serve_replicas(config, keys, origins, flags, cluster, limits)
        return
    prefixes = read_prefixes(flags.pin_prefix or [])
    listeners = listen(flags.host, flags.port)
    access = Access(*keys, are_loopback(listeners), {flags.host, *(flags.allowed_host or ())}, origins, key_file)
    limits.connections()
    observers = _observers(flags)
    render.say(f"llmsched serve {config.model}")  # fails now, not after loading, if stdout cannot be written

    from llmsched.engine.build import build_engine

    with detached_output():
        with render.progress_bar() as progress:
            engine = build_engine(config, progress, flags.metrics_prefix, flags.served_model_name)
        if flags.log_format == "text":
            render.show_log()  # now, because a line of the log would break the progress bar
        if flags.profile and engine.plan is not None and (problem := store_ratios(flags.profile, engine.plan, config)):
            render.warn(f"the measured memory could not be saved in the profile: {problem}")
        engine.prefixes.changes.quote_prompts = flags.show_prompt_text
        pin_prefixes(engine, prefixes, flags.served_model_name)
        favour_latency()
        asyncio.run(_serve(engine, listeners, access, limits, flags, observers))


def _serve_replicas(
    config: EngineConfig,
    keys: tuple[str | None, str | None],
    origins: Collection[str],
    flags: ServerFlags,
    cluster: ClusterFlags,
    limits: HttpLimits,
) -> None:
    from llmsched.cli.cluster.replica_spec import ReplicaSpec
    from llmsched.cli.cluster.start import start_replicas

    spec = ReplicaSpec(
        config,
        flags.served_model_name,
        limits,
        *keys,
        allowed_hosts=(flags.host, *(flags.allowed_host or ())),
        cors_origins=tuple(origins),
        tool_call_parser=flags.tool_call_parser,
        reasoning_parser=flags.reasoning_parser,
        grace_period=flags.grace_period,
        step_timeout=flags.step_timeout,
        metrics_prefix=flags.metrics_prefix,
        ui=flags.ui,
    )
    start_replicas(spec, cluster, flags.host, flags.port)


def _observers(flags: ServerFlags) -> list[RequestObserver]:
    """Return the functions that the server calls with every request that has ended."""
    from llmsched.cli.serve.request_log import log_request
    from llmsched.cli.serve.tracing import otlp_tracer

    logs_requests = flags.log_format == "json" if flags.log_requests is None else flags.log_requests
    observers: list[RequestObserver] = [log_request] if logs_requests else []
    return observers if flags.otlp_endpoint is None else [*observers, otlp_tracer(flags.otlp_endpoint)]


async def _serve(
    engine: Engine,
    listeners: list[socket.socket],
    access: Access,
    limits: HttpLimits,
    flags: ServerFlags,
    observers: list[RequestObserver],
) -> NoReturn:
    from llmsched.cli.serve.app import build_app
    from llmsched.cli.serve.banner import show_start
    from llmsched.cli.serve.detached_output import leave
    from llmsched.cli.serve.lifecycle import EXIT_S, Server
    from llmsched.cli.serve.status_line import log_status
    from llmsched.cli.serve.tracing import EXPORT_S, RequestTracer
    from llmsched.engine.async_engine import AsyncEngine
    from llmsched.engine.text.parsers.notation import find_notation

    notation = find_notation(engine.tokenizer, flags.tool_call_parser, flags.reasoning_parser)
    name = flags.served_model_name or engine.model.name
    service = AsyncEngine(engine, step_timeout_s=flags.step_timeout)
    service.start()

    def on_drain() -> None:
        render.note(
            f"draining: {service.num_open} requests have {render.human_seconds(flags.grace_period)} to finish; "
            "a second signal exits at once"
        )
        # The timer ends the process if anything hangs that the server does not know of.
        last_resort = threading.Timer(flags.grace_period + EXIT_S, os._exit, [1])
        last_resort.daemon = True
        last_resort.start()

    if access.key_file is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload_keys, access.key_file)
    status = asyncio.create_task(log_status(service.recent, flags.status_interval)) if flags.status_interval else None
    server = Server(
        build_app(service, name, access, limits, notation, observers, ui=flags.ui),
        service,
        limits,
        grace_s=flags.grace_period,
        on_ready=lambda: show_start(
            engine,
            name,
            listeners[0],
            has_key=access.has_keys,
            ui=flags.ui,
            profile=flags.profile,
            notation=notation,
        ),
        on_drain=on_drain,
    )
    await server.serve(listeners)
    if status:
        status.cancel()
    if service.error:
        render.error(f"the engine has failed: {service.error}")
    for observer in observers:
        if isinstance(observer, RequestTracer):
            observer.close(EXPORT_S)
    leave(server.exit_code)


def _reload_keys(file: KeyFile) -> None:
    try:
        file.reload()
    except ConfigError as error:
        render.warn(f"the API keys stay as they are: {error.text(flag)}")
    else:
        render.note(f"{len(file)} API keys read again")
