from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from llmsched.cli.load.arrivals import ArrivalProcess
from llmsched.cli.load.load import Load
from llmsched.cli.load.random_lengths import SYNTAX, parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.load.traces.file_rows import TraceError
from llmsched.cli.load.traces.formats import TraceFormat
from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.load.traces.timestamps import TimestampUnit
from llmsched.cli.options.flags import duration_option, typed, with_options
from llmsched.cli.quantities import fraction
from llmsched.engine.errors import ConfigError, LlmschedError, check_range, setting
from llmsched.profiles.shipped_workloads import find_workload, workloads
from llmsched.profiles.toml_files import UnknownNameError

R = TypeVar("R")

#: Flags of a synthetic load that have no effect on a trace, and what to do instead.
_SYNTHETIC = {
    "num_prompts": "--limit keeps the first requests",
    "input_len": "--max-input-len cuts long prompts",
    "prefix_len": "a trace already states which prefixes its prompts share",
}


@dataclass(frozen=True)
class SourceFlags:
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"A load that comes with llmsched: {', '.join(workloads())}. Other flags change its settings.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Send the requests of a file: Azure or BurstGPT CSV, Mooncake, Bailian or ShareGPT JSON, a log or "
            "data set (JSONL or CSV with messages, prompt or text_input; max_tokens, output_tokens or an answer; "
            "perhaps timestamp), an OpenAI batch or fine-tuning file, or a table of lengths; gzip is unpacked. An "
            "answer in the file is not sent, but gives the number of tokens to ask for. Requests are sent at the "
            "recorded times; --request-rate rescales them to that mean rate. Prompts too long for the target are sent "
            "anyway and count as failed. Lengths of 0 are sent as 1.",
        ),
    ] = None


@dataclass(frozen=True)
class TraceFlags:
    trace_format: Annotated[
        TraceFormat | None,
        typer.Option(show_default="recognised from the file", help="Format of the trace."),
    ] = None
    timestamp_unit: Annotated[
        TimestampUnit | None,
        typer.Option(
            show_default="judged by the format and the size of the numbers",
            help="Unit of numeric timestamps. The report says which one was taken.",
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="REQUESTS", help="Use only the first requests of the trace, by time.")
    ] = None
    turns: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="1",
            help="Number of turns of each ShareGPT conversation that become requests. Each request contains the turns "
            "before it.",
        ),
    ] = None
    trace_block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            show_default="512; 16 for Bailian",
            help="Number of tokens per entry of hash_ids in a Mooncake or Bailian trace.",
        ),
    ] = None

    def reading(self) -> dict[str, Any]:
        """Return the flags that were given, as keyword arguments of `read_trace`."""
        values = {f.name: getattr(self, f.name) for f in fields(TraceFlags)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class LoadFlags(TraceFlags, SourceFlags):
    """Flags of a load. A flag that was not given is None or False, except `seed` and `timeout`, which have defaults."""

    ignore_timestamps: Annotated[
        bool,
        typer.Option(
            "--ignore-timestamps",
            help="Send the requests of a trace in their order, but at times set by --request-rate or "
            "--max-concurrency.",
        ),
    ] = False
    speedup: Annotated[
        float | None,
        typer.Option(metavar="FACTOR", show_default="1", help="Replay a trace this many times as fast."),
    ] = None
    max_input_len: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Cut longer prompts of a trace to this length.")
    ] = None
    max_output_len: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Cut longer answers of a trace to this length.")
    ] = None
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Number of requests to send.")] = None
    input_len: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help=f"Tokens of each prompt: {SYNTAX}. Samples above MAX are cut to MAX."),
    ] = None
    output_len: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of each answer, in the same syntax. With a trace, it applies to requests of which the trace "
            "states neither an answer nor its length.",
        ),
    ] = None
    prefix_len: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Number of tokens at the beginning that all prompts share, like a system prompt.",
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND",
            help="Open loop: send this many requests per second on a schedule, however slow the answers are. inf sends "
            "all at once.",
        ),
    ] = None
    arrivals: Annotated[
        ArrivalProcess | None,
        typer.Option(
            show_default="poisson",
            help="How requests are spread over time. ramp: the rate goes from --request-rate to --ramp-to. daynight: "
            "the rate swings around --request-rate, see --day-period.",
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        typer.Option(
            metavar="SHAPE",
            show_default="1",
            help="Shape of the gamma distribution of the gaps between requests: 1 is Poisson, 0.25 varies twice as "
            "much, 4 half as much.",
        ),
    ] = None
    ramp_to: Annotated[
        float | None,
        typer.Option(
            metavar="PER_SECOND",
            help="Rate at the end of a ramp. The ramp lasts --duration, or until --num-prompts are sent.",
        ),
    ] = None
    day_period: Annotated[
        float | None,
        duration_option(
            "Length of a daynight day. The load begins at night, when the rate is lowest.", show_default="10min"
        ),
    ] = None
    day_amplitude: Annotated[
        float | None,
        typer.Option(
            parser=typed(fraction),
            metavar="SHARE",
            show_default="0.8",
            help="How far a daynight rate swings around its mean: 0.8 means from 0.2 to 1.8 times the mean.",
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Closed loop: keep this many requests in flight. With --request-rate, cap the requests in flight; the "
            "wait for one to end counts as latency.",
        ),
    ] = None
    duration: Annotated[
        float | None,
        duration_option(
            "Send requests for this long; --num-prompts then is an upper limit. With a trace, send only the requests "
            "due within this time.",
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="The same seed gives the same lengths and times and, with the same --prompt-seed, the same prompts. A "
            "new seed gives prompts that no prefix cache holds.",
        ),
    ] = 0
    prompt_seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default="0; for a URL, a new one in each run",
            help="Seed of the tokens of random prompts and block ids, used with --seed. Runs on a server share cached "
            "prompts only if you give them the same number. Texts of a trace are the same in each run; vLLM, SGLang "
            "and llmsched get a cache salt with them, which 0 leaves out.",
        ),
    ] = None
    timeout: Annotated[float, duration_option("Time after which a request counts as failed.", show_default="10min")] = (
        600.0
    )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Load that flags describe."""

    load: Load
    timeout: float  # seconds per request
    trace: Path | None  # file of the trace, if a flag names one


def with_load_options(**defaults: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a decorator that passes the load of the flags to a Typer command as `load_options: LoadOptions`.

    `defaults` are for a synthetic load. The default max_concurrency also applies to a trace without times.
    """

    def make(flags: LoadFlags) -> LoadOptions:
        check_range("timeout", flags.timeout, flags.timeout > 0, "above 0 s")
        return LoadOptions(make_load(flags, defaults), flags.timeout, flags.trace)

    shown = defaults.copy()
    if "max_concurrency" in defaults:
        shown["max_concurrency"] = f"{defaults['max_concurrency']} without --request-rate or a trace's own times"
    return with_options("load_options", LoadFlags, make, shown=shown)


def make_load(flags: LoadFlags, defaults: Mapping[str, Any]) -> Load:
    """Return the load that the flags describe. Raises LlmschedError for contradicting flags or a bad trace."""
    reading, other = flags.reading(), {f.name for f in fields(TraceFlags)} | {"timeout", "workload", "trace"}
    values = {f.name: getattr(flags, f.name) for f in fields(flags) if f.name not in other}
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    if flags.burstiness is not None:
        given.setdefault("arrivals", "gamma")
    path, name = flags.trace, None
    shape: Mapping[str, Any] = {}
    if flags.workload is not None and flags.trace is not None:
        raise LlmschedError("--trace and --workload both name a load; give one of them")
    if flags.workload is not None:
        try:
            found = find_workload(flags.workload)
        except UnknownNameError as problem:
            raise ConfigError("workload", str(problem)) from problem
        path, name, shape = found.file, found.name, found.settings
    if path is not None:
        return _trace_load(path, name, reading, given, defaults.get("max_concurrency"))
    of_traces = ("ignore_timestamps", "speedup", "max_input_len", "max_output_len")
    given = {**shape, **given}
    if useless := [*reading, *(name for name in of_traces if name in given)]:
        raise LlmschedError(
            f"{', '.join(map(setting, useless))}: only has an effect with --trace, or a --workload that is a trace"
        )
    if "duration" in given:
        given.setdefault("num_prompts", None)
    _fall_back(given, defaults.get("max_concurrency"))
    settings = {name: value for name, value in defaults.items() if name != "max_concurrency"} | given
    for name in ("input_len", "output_len"):
        settings[name] = parse_lengths(str(settings[name]), name)
    return SyntheticLoad(**settings)


def _trace_load(
    path: Path, name: str | None, reading: Mapping[str, Any], given: dict[str, Any], concurrency: int | None
) -> TraceLoad:
    for flag, instead in _SYNTHETIC.items():
        if flag in given:
            raise ConfigError(flag, f"has no effect on a trace; {instead}")
    try:
        trace = read_trace(path, name=name, **reading)
    except TraceError as problem:
        raise problem if name else ConfigError("trace", problem.message) from problem
    if "output_len" in given:
        given["output_len"] = parse_lengths(given["output_len"], "output_len")
    if not (trace.timed and "ignore_timestamps" not in given):
        _fall_back(given, concurrency)
    return TraceLoad(trace=trace, **given)


def _fall_back(given: dict[str, Any], concurrency: int | None) -> None:
    if concurrency is not None and "request_rate" not in given:
        given.setdefault("max_concurrency", concurrency)
