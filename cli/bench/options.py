"""The options that say what load to send, which latencies to hold, and how to talk to a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import typer

from llmsched.cli.bench.arrivals import ArrivalProcess
from llmsched.cli.bench.client import Endpoint
from llmsched.cli.bench.lengths import SYNTAX, parse_lengths
from llmsched.cli.bench.load import Load
from llmsched.cli.bench.workload import Workload
from llmsched.cli.options import duration as parse_duration
from llmsched.cli.options import fraction, with_options
from llmsched.engine.latency import Slo

R = TypeVar("R")

_LOAD = "Load"
_SLO = "SLOs"
_SERVER = "Server (with a URL)"


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """The flags that say what is sent, when; None where one was left out."""

    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="Requests to send.", rich_help_panel=_LOAD)
    ] = None
    input_len: Annotated[
        str | None,
        typer.Option(
            "--input-len",
            metavar="TOKENS",
            help=f"Tokens of each prompt: {SYNTAX}; longer than MAX is cut to MAX.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    output_len: Annotated[
        str | None,
        typer.Option(
            "--output-len", metavar="TOKENS", help="Tokens of each answer, written likewise.", rich_help_panel=_LOAD
        ),
    ] = None
    prefix_len: Annotated[
        int | None,
        typer.Option(
            "--prefix-len",
            min=0,
            metavar="TOKENS",
            help="How many of the prompt's tokens are the same in every prompt, like a system prompt.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate",
            metavar="PER_SECOND",
            show_default=False,
            help="Open loop: send by a schedule of this many requests per second, come what may; inf: all at once.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    arrivals: Annotated[
        ArrivalProcess | None,
        typer.Option(
            "--arrivals",
            show_default="poisson",
            help="How a schedule spreads. ramp: from --request-rate to --ramp-to. daynight: the rate swings around "
            "--request-rate, see --day-period.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            "--burstiness",
            metavar="SHAPE",
            show_default="1",
            help="Gamma-distributed gaps of this shape: 1 is Poisson, 0.25 twice as irregular, 4 half.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    ramp_to: Annotated[
        float | None,
        typer.Option(
            "--ramp-to",
            metavar="PER_SECOND",
            show_default=False,
            help="Rate at the end of a ramp, which takes --duration, or all of --num-prompts.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    day_period: Annotated[
        float | None,
        typer.Option(
            "--day-period",
            parser=parse_duration,
            metavar="DURATION",
            show_default="10min",
            help="daynight: how long a day lasts; the load begins at night.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    day_amplitude: Annotated[
        float | None,
        typer.Option(
            "--day-amplitude",
            parser=fraction,
            metavar="SHARE",
            show_default="0.8",
            help="daynight: how far the rate swings around its mean; 0.8: from 0.2 to 1.8 times.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            min=1,
            show_default=False,
            help="Closed loop: this many requests at a time. Together with --request-rate it caps the open loop, and "
            "latencies then include the wait for a free slot.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    duration: Annotated[
        float | None,
        typer.Option(
            "--duration",
            parser=parse_duration,
            metavar="DURATION",
            show_default=False,
            help="Send for this long, however many requests that is (with --num-prompts: at most so many).",
            rich_help_panel=_LOAD,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, help="Same seed, same prompts and arrivals; another is cold.", rich_help_panel=_LOAD
        ),
    ] = 0
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            show_default="10min",
            parser=parse_duration,
            metavar="DURATION",
            help="How long a request may take before it counts as failed.",
            rich_help_panel=_LOAD,
        ),
    ] = 600.0

    def load(self, defaults: Mapping[str, Any]) -> Load:
        """The load; `defaults` stand for what was left out. Raises LlmschedError naming the setting."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        del given["timeout"]
        if self.duration is not None:
            given.setdefault("num_prompts", None)
        if self.burstiness is not None:
            given.setdefault("arrivals", "gamma")
        if self.request_rate is None and self.max_concurrency is None and "max_concurrency" in defaults:
            given["max_concurrency"] = defaults["max_concurrency"]
        settings = {name: value for name, value in defaults.items() if name != "max_concurrency"} | given
        for name in ("input_len", "output_len"):
            settings[name] = parse_lengths(str(settings[name]), name)
        return Workload(**settings)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to send, when, and how long a request may take (seconds)."""

    load: Load
    timeout: float


def with_load_options(**defaults: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a Typer command the options of a load; it takes a keyword `load_options: LoadOptions` in their place.

    `defaults` are those of a synthetic load that differ between commands; max_concurrency only holds without a rate.
    """

    def make(flags: LoadFlags) -> LoadOptions:
        return LoadOptions(flags.load(defaults), flags.timeout)

    shown = defaults.copy()
    if "max_concurrency" in defaults:
        shown["max_concurrency"] = f"{defaults['max_concurrency']} without --request-rate"
    return with_options("load_options", LoadFlags, make, shown=shown)


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
    slo_itl: Annotated[float | None, _slo("itl", "the gap between tokens (P99)")] = None
    slo_tpot: Annotated[float | None, _slo("tpot", "the time per output token")] = None
    slo_e2e: Annotated[float | None, _slo("e2e", "the time to the last token")] = None

    def slo(self) -> Slo:
        """The targets."""
        return Slo(self.slo_ttft, self.slo_itl, self.slo_tpot, self.slo_e2e)


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
            help="Whose vocabulary to draw prompts from, and to count tokens with if the server states no usage.",
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


def with_server_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a Typer command the options of a server; it takes a keyword `server: ServerFlags` in their place."""
    return with_options("server", ServerFlags)(command)
