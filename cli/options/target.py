"""The options that say which latencies to hold and how to talk to a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer

from llmsched.cli.options.engine import duration as parse_duration
from llmsched.cli.options.engine import with_options
from llmsched.cli.targets.client import Endpoint
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import READER_SPEED, Slo

R = TypeVar("R")

_SLO = "SLOs"
_SERVER = "Server (with a URL)"


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
