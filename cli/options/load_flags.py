"""The flags of a load, one field each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmsched.cli.load.arrivals import ArrivalProcess
from llmsched.cli.load.lengths import SYNTAX
from llmsched.cli.load.traces.formats import TraceFormat
from llmsched.cli.load.traces.times import TimestampUnit
from llmsched.cli.options.engine import duration as parse_duration
from llmsched.cli.options.engine import fraction
from llmsched.profiles.shipped_workloads import workloads

_LOAD = "Load"

#: How a file of requests is read, for every command that reads one.
TraceFormatOption = Annotated[
    TraceFormat | None,
    typer.Option(
        "--trace-format",
        show_default="what the file looks like",
        help="What the file of requests is.",
        rich_help_panel=_LOAD,
    ),
]
TimestampUnitOption = Annotated[
    TimestampUnit | None,
    typer.Option(
        "--timestamp-unit",
        show_default="ms for Mooncake, else s",
        help="Unit of timestamps that are numbers. Times since 1970 are recognised whatever their unit.",
        rich_help_panel=_LOAD,
    ),
]
LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit",
        min=1,
        metavar="REQUESTS",
        show_default=False,
        help="Only the first requests of the file, by time.",
        rich_help_panel=_LOAD,
    ),
]
TurnsOption = Annotated[
    int | None,
    typer.Option(
        "--turns",
        min=1,
        show_default="1",
        help="How many turns of each ShareGPT conversation become requests, each with what was said before.",
        rich_help_panel=_LOAD,
    ),
]
TraceBlockSizeOption = Annotated[
    int | None,
    typer.Option(
        "--trace-block-size",
        min=1,
        metavar="TOKENS",
        show_default="512",
        help="How many tokens one of the hash_ids of a Mooncake trace stands for.",
        rich_help_panel=_LOAD,
    ),
]


@dataclass(frozen=True, slots=True)
class LoadFlags:
    """The flags that say what is sent, when; None (False) where one was left out."""

    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            metavar="NAME",
            show_default=False,
            help=f"A load that comes with llmsched: {', '.join(workloads())}. Other flags change it.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            show_default=False,
            help="Requests of a file: Azure or BurstGPT CSV, Mooncake or ShareGPT JSON, a log of requests (JSONL with "
            "messages or prompt, max_tokens, timestamp), or lengths alone; may be packed with gzip. They are sent at "
            "the file's own times; --request-rate scales these to another mean rate. "
            "Prompts that are too long for the target fail there; lengths of 0 are sent as 1.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    trace_format: TraceFormatOption = None
    timestamp_unit: TimestampUnitOption = None
    ignore_timestamps: Annotated[
        bool,
        typer.Option(
            "--ignore-timestamps",
            help="Take the requests of a trace in their order, but send by --request-rate or --max-concurrency.",
            rich_help_panel=_LOAD,
        ),
    ] = False
    speedup: Annotated[
        float | None,
        typer.Option(
            "--speedup",
            metavar="FACTOR",
            show_default="1",
            help="Run a trace this many times as fast.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    limit: LimitOption = None
    turns: TurnsOption = None
    trace_block_size: TraceBlockSizeOption = None
    max_input_len: Annotated[
        int | None,
        typer.Option(
            "--max-input-len",
            min=1,
            metavar="TOKENS",
            show_default=False,
            help="Cut longer prompts of a trace to this.",
            rich_help_panel=_LOAD,
        ),
    ] = None
    max_output_len: Annotated[
        int | None,
        typer.Option(
            "--max-output-len",
            min=1,
            metavar="TOKENS",
            show_default=False,
            help="Cut longer answers of a trace to this.",
            rich_help_panel=_LOAD,
        ),
    ] = None

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
            "--output-len",
            metavar="TOKENS",
            help="Tokens of each answer, written likewise; of a trace, those of requests that do not say.",
            rich_help_panel=_LOAD,
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
            help="Send for this long, however many requests that is (with --num-prompts: at most so many; of a trace: "
            "all that come before).",
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
