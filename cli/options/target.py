"""The options that say which latencies to hold and how to talk to a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, TypeVar

import httpx
import typer

from llmsched.cli.options.engine import EngineOptions, with_options
from llmsched.cli.options.engine import duration as parse_duration
from llmsched.cli.targets.http_target import Endpoint, HttpOptions
from llmsched.cli.targets.interface import RunPlan
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import READER_SPEED, Slo

R = TypeVar("R")

_SLO = "SLOs"
_SERVER = "Server (with a URL)"

_LOOKUP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ItlTarget:
    """A limit in seconds for one statistic of a request's gaps between tokens."""

    statistic: str
    limit: float


def parse_itl_target(text: str | ItlTarget) -> ItlTarget:
    """A duration, or a statistic and a duration with a colon between them: 50ms, p99:50ms, mean:30ms, max:1s."""
    if isinstance(text, ItlTarget):
        return text
    statistic, colon, limit = text.rpartition(":")
    target = ItlTarget(statistic if colon else "p99", parse_duration(limit))
    try:
        Slo(itl=target.limit, itl_statistic=target.statistic)
    except LlmschedError as problem:
        raise typer.BadParameter(str(problem)) from problem
    return target


def simulate_option(doing: str) -> typer.models.OptionInfo:
    """--simulate of a command that does so much of its work on a virtual clock."""
    option: typer.models.OptionInfo = typer.Option(
        "--simulate",
        metavar="GPU[:ENGINE]|local",
        show_default=False,
        help=f"{doing} on a virtual clock, as on this GPU (l4, h100, ...; h100:vllm: with steps as fast as vLLM's), or "
        "as here with local, after `llmsched calibrate`; of MODEL only its config.json is needed.",
    )
    return option


def _slo(figure: str, meaning: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--slo-{figure}",
        parser=parse_duration,
        metavar="DURATION",
        show_default=False,
        help=f"Target for {meaning}, such as 800ms.",
        rich_help_panel=_SLO,
    )
    return option


@dataclass(frozen=True, slots=True)
class SloFlags:
    """The flags of the latency targets."""

    slo_ttft: Annotated[float | None, _slo("ttft", "the time to the first token")] = None
    slo_itl: Annotated[
        ItlTarget | None,
        typer.Option(
            "--slo-itl",
            parser=parse_itl_target,
            metavar="[STATISTIC:]DURATION",
            show_default=False,
            help="Target for the gaps between the tokens of a request: 50ms or p99:50ms is their P99; p50 to p99.9, "
            "mean and max can be asked for likewise.",
            rich_help_panel=_SLO,
        ),
    ] = None
    slo_tpot: Annotated[float | None, _slo("tpot", "the time per output token")] = None
    slo_e2e: Annotated[float | None, _slo("e2e", "the time to the last token")] = None
    reader_speed: Annotated[
        float,
        typer.Option(
            "--reader-speed",
            metavar="TOKENS_PER_SECOND",
            help="How fast the reader is who tells which pauses are noticed; 10 is more than most people read.",
            rich_help_panel=_SLO,
        ),
    ] = READER_SPEED

    def slo(self) -> Slo:
        """Return the targets. Raises ConfigError unless the reader's speed is above 0 and finite."""
        itl = self.slo_itl
        return Slo(
            self.slo_ttft,
            None if itl is None else itl.limit,
            self.slo_tpot,
            self.slo_e2e,
            "p99" if itl is None else itl.statistic,
            self.reader_speed,
        )


def with_slo_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a Typer command the options of the latency targets; it takes a keyword `slo: Slo` in their place."""
    return with_options("slo", SloFlags, SloFlags.slo)(command)


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Flags that only a URL has use for; None or False: not given."""

    endpoint: Annotated[
        Endpoint | None,
        typer.Option("--endpoint", show_default="completions", help="Which API to use.", rich_help_panel=_SERVER),
    ] = None
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            show_default="the first of /v1/models",
            help="Model to ask for.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar=["LLMSCHED_API_KEY", "OPENAI_API_KEY"],
            help="Sent as bearer token.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="MODEL",
            help="Whose vocabulary to draw prompts from, to make token ids of the texts of a trace with, and to count "
            "tokens with if the server states no usage.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    text_prompts: Annotated[
        bool,
        typer.Option(
            "--text-prompts",
            help="Send words, not token ids (the chat endpoint always gets words).",
            rich_help_panel=_SERVER,
        ),
    ] = False
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos", help="Do not send ignore_eos, for servers that refuse it.", rich_help_panel=_SERVER
        ),
    ] = False
    no_usage: Annotated[
        bool,
        typer.Option(
            "--no-usage",
            help="Do not ask for token counts (stream_options), for servers that refuse it; --tokenizer counts then.",
            rich_help_panel=_SERVER,
        ),
    ] = False


def with_server_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a Typer command the options of a server; it takes a keyword `server: ServerFlags` in their place."""
    return with_options("server", ServerFlags)(command)


def http_options(url: str, plan: RunPlan, flags: ServerFlags, engine_options: EngineOptions) -> HttpOptions:
    """Return the settings for talking to the server. Raise LlmschedError for a bad URL and for flags it cannot heed."""
    if engine_options.given:
        names = ", ".join("--" + name.replace("_", "-") for name in engine_options.given)
        raise LlmschedError(f"{names}: the settings of a running server cannot be changed from here")
    _check_url(url)
    if flags.api_key is not None and not (flags.api_key.isascii() and flags.api_key.isprintable()):
        raise LlmschedError("--api-key may hold printable ASCII letters only, as an HTTP header does")
    return HttpOptions(
        url,
        endpoint=flags.endpoint or ("chat" if url.rstrip("/").endswith("/chat/completions") else "completions"),
        model=flags.served_model_name,
        api_key=flags.api_key,
        ignore_eos=not flags.stop_at_eos,
        ask_usage=not flags.no_usage,
        tokenizer=flags.tokenizer,
        text_prompts=flags.text_prompts,
        lookup_timeout=min(_LOOKUP_TIMEOUT_S, plan.timeout),
        timelines=plan.timelines,
    )


def _check_url(url: str) -> None:
    """Raise LlmschedError for an invalid URL, and for parts of it that are not sent."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as problem:
        raise LlmschedError(f"{url!r} is not a URL: {problem}") from problem
    if not parsed.host:
        raise LlmschedError(f"{url!r} names no host; write http://host:port")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise LlmschedError(f"{url!r}: port must be 1 to 65535, not {parsed.port}")
    if parsed.userinfo:
        raise LlmschedError("a user or password in the URL is not supported; --api-key sends a key")
    if parsed.query or parsed.fragment:
        raise LlmschedError(f"{url!r} has a query or a fragment; name the URL up to /v1")


def refuse_server_flags(typed: Sequence[str]) -> None:
    """Raise LlmschedError if flags that apply only to a URL are among the `typed` ones.

    OPENAI_API_KEY may be set for other reasons, so a key from the environment is not a mistake.
    """
    useless = {"--" + f.name.replace("_", "-") for f in fields(ServerFlags)}
    if given := [name for name in typed if name in useless]:
        raise LlmschedError(
            f"{', '.join(given)}: only of use with the URL of a server, and the target is a model in this process"
        )
