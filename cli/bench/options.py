"""The options that say what load to send and which latencies to hold; bench and tune take the same."""

from __future__ import annotations

from typing import Annotated

import typer

from llmsched.cli.bench.client import Endpoint
from llmsched.cli.bench.load import ArrivalProcess
from llmsched.cli.options import duration

_LOAD = "Load"
_SLO = "SLOs"
_SERVER = "Server (with a URL)"

NumPrompts = Annotated[int, typer.Option("--num-prompts", min=1, help="Requests to send.", rich_help_panel=_LOAD)]
InputLen = Annotated[
    int, typer.Option("--input-len", min=1, metavar="TOKENS", help="Tokens of each prompt.", rich_help_panel=_LOAD)
]
OutputLen = Annotated[
    int, typer.Option("--output-len", min=1, metavar="TOKENS", help="Tokens of each answer.", rich_help_panel=_LOAD)
]
PrefixLen = Annotated[
    int,
    typer.Option(
        "--prefix-len",
        min=0,
        metavar="TOKENS",
        help="How many of the prompt's tokens are the same in every prompt, like a system prompt.",
        rich_help_panel=_LOAD,
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(
        "--request-rate",
        metavar="PER_SECOND",
        show_default=False,
        help="Open loop: send by a schedule of this many requests per second, come what may; inf: all at once.",
        rich_help_panel=_LOAD,
    ),
]
Arrivals = Annotated[ArrivalProcess, typer.Option("--arrivals", help="How a schedule spreads.", rich_help_panel=_LOAD)]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(
        "--max-concurrency",
        min=1,
        show_default=False,
        help="Closed loop: this many requests at a time. Together with --request-rate it caps the open loop, and "
        "latencies then include the wait for a free slot.",
        rich_help_panel=_LOAD,
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", min=0, help="Same seed, same prompts and arrivals; another is cold.", rich_help_panel=_LOAD),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        show_default="10min",
        parser=duration,
        metavar="DURATION",
        help="How long a request may take before it counts as failed.",
        rich_help_panel=_LOAD,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        min=0,
        show_default="1 in this process, 0 for a URL",
        help="Requests sent before the run and not measured.",
        rich_help_panel=_LOAD,
    ),
]


def _slo(figure: str, meaning: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--slo-{figure}",
        parser=duration,
        metavar="DURATION",
        show_default=False,
        help=f"Target for {meaning}, such as 800ms.",
        rich_help_panel=_SLO,
    )
    return option


SloTtft = Annotated[float | None, _slo("ttft", "the time to the first token")]
SloItl = Annotated[float | None, _slo("itl", "the gap between tokens (P99)")]
SloTpot = Annotated[float | None, _slo("tpot", "the time per output token")]
SloE2e = Annotated[float | None, _slo("e2e", "the time to the last token")]

ServerEndpoint = Annotated[
    Endpoint | None,
    typer.Option("--endpoint", show_default="completions", help="Which API to use.", rich_help_panel=_SERVER),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        show_default="the first of /v1/models",
        help="Model to ask for.",
        rich_help_panel=_SERVER,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=["LLMSCHED_API_KEY", "OPENAI_API_KEY"],
        help="Sent as bearer token.",
        rich_help_panel=_SERVER,
    ),
]
TokenizerOf = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="MODEL",
        help="Whose vocabulary to draw prompts from, and to count tokens with if the server states no usage.",
        rich_help_panel=_SERVER,
    ),
]
TextPrompts = Annotated[
    bool,
    typer.Option(
        "--text-prompts",
        help="Send words, not token ids (the chat endpoint always gets words).",
        rich_help_panel=_SERVER,
    ),
]
StopAtEos = Annotated[
    bool,
    typer.Option("--stop-at-eos", help="Do not send ignore_eos, for servers that refuse it.", rich_help_panel=_SERVER),
]

#: Default of --timeout, in seconds.
DEFAULT_TIMEOUT_S = 600.0
