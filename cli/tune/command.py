"""`llmsched tune`: find the settings that serve most and still meet the latency targets."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer

from llmsched.cli import render
from llmsched.cli.options.engine import EngineOptions, ModelArgument, duration, resolve_model, with_engine_options
from llmsched.cli.options.load import LoadOptions, with_load_options
from llmsched.cli.options.target import simulate_option, with_slo_options
from llmsched.cli.output_files import check_file, writing
from llmsched.cli.tune.job import Outcome, Task, tune_engine, tune_simulated
from llmsched.cli.tune.knobs import KNOBS, parse_knobs
from llmsched.cli.tune.report import as_json, make_profile, page, show
from llmsched.cli.tune.resume import state_path
from llmsched.cli.tune.trials import Goal
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import Slo
from llmsched.engine.memory.planner import model_name
from llmsched.profiles.toml_files import ProfileError, check_writable
from llmsched.profiles.tuned import profile_path, save_profile

_SEARCH = "Search"
_ROUNDS = 3
#: Knobs that a flag fixes; those of the others are the largest values tried.
_FIXED = frozenset({"headroom", "target_itl"})
_MOST_TOKENS = EngineConfig.knob_rule("max_num_batched_tokens")["high"]


@with_engine_options(exclude=("seed",))
@with_slo_options
@with_load_options(num_prompts=32, input_len=128, output_len=32, max_concurrency=4)
def tune(
    model: ModelArgument = None,
    maximize: Annotated[
        Goal,
        typer.Option(
            "--maximize",
            help="What is to be most, of the settings that meet the SLOs: requests per second that met them, or output "
            "tokens per second. Without an SLO it is always throughput.",
            rich_help_panel=_SEARCH,
        ),
    ] = "goodput",
    knobs: Annotated[
        str | None,
        typer.Option(
            "--knobs",
            metavar="NAMES",
            show_default=f"{','.join(KNOBS)}, but those that a flag fixes",
            help="What to search, with commas between. A knob that cannot matter under this load is left alone.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            show_default="3",
            help="How often the best settings are measured in full, at most.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            parser=duration,
            metavar="DURATION",
            show_default="3min",
            help="No further round is begun that would not end in this time; the first always is.",
            rich_help_panel=_SEARCH,
        ),
    ] = 180.0,
    min_num_batched_tokens: Annotated[
        int,
        typer.Option(
            "--min-num-batched-tokens",
            min=1,
            max=_MOST_TOKENS,
            metavar="TOKENS",
            help="Smallest value tried; --max-num-batched-tokens is the largest, as --max-num-seqs is of its knob.",
            rich_help_panel=_SEARCH,
        ),
    ] = 32,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the search of the same command that was interrupted.", rich_help_panel=_SEARCH
        ),
    ] = False,
    warm_start: Annotated[
        bool,
        typer.Option(
            "--warm-start/--no-warm-start",
            help="Begin from the last profile of this model and device.",
            rich_help_panel=_SEARCH,
        ),
    ] = True,
    simulate: Annotated[str | None, simulate_option("Search")] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a page with the curve to FILE (HTML, opens offline)."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="NAME|PATH",
            show_default="the model's name, and what is simulated",
            help="Profile to write.",
        ),
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    load_options: LoadOptions,
    slo: Slo,
    engine_options: EngineOptions,
) -> None:
    """Find the settings that serve most and meet your latency targets.

    Tries max_num_batched_tokens in powers of two under one load (4 requests at a time unless you say otherwise), then
    max_num_seqs, headroom and target_itl, each from the best so far: short runs for all, longer ones for the better
    half, repeats of the best in turn until it is clear which wins (simulated: all in full, once, where time allows;
    each gives what `bench --simulate` gives with the same flags). Writes the winner as a profile for `llmsched serve
    --profile`. Exit code 1 if no setting meets the targets.

    \b
    Examples:
      llmsched tune demo --slo-ttft 800ms --slo-itl 50ms
      llmsched tune demo --max-concurrency 16 --input-len 512 --slo-tpot 60ms --maximize throughput
      llmsched tune demo --request-rate 3 --knobs max_num_batched_tokens --time-limit 10min --output chat
      llmsched tune Qwen/Qwen3-8B --simulate h100 --workload azure-code --slo-ttft 2s --report curve.html
    """
    load_options.load.check_shape()
    _check_smallest(min_num_batched_tokens, engine_options)
    if report is not None:
        check_file("--report", report, load_options.trace)
    name = _model(model)
    if simulate is not None and rounds is not None:
        raise LlmschedError("--rounds: a virtual clock says the same each time; leave it or --simulate out")
    task = Task(
        load=load_options.load,
        slo=slo,
        goal=maximize,
        knobs=_knobs(knobs, engine_options),
        timeout=load_options.timeout,
        rounds=_ROUNDS if rounds is None else rounds,
        time_limit=time_limit,
        smallest=min_num_batched_tokens,
        destination=_destination(output, name, simulate),
        resume=resume,
        warm_start=warm_start,
    )
    if not slo.given():
        render.note("no SLO given (--slo-ttft, --slo-itl, ...): the most throughput wins, whatever the latency")
    try:
        with render.progress_bar() as progress:
            if simulate is None:
                outcome = asyncio.run(tune_engine(name, task, engine_options, progress))
            else:
                outcome = asyncio.run(tune_simulated(name, simulate, task, engine_options, progress))
    except KeyboardInterrupt:
        if state_path(task.destination).exists():
            render.note("interrupted; the same command with --resume goes on from here")
        raise
    written = _save(outcome, engine_options)
    if report is not None:
        with writing("--report", report):
            report.write_text(page(outcome, written), encoding="utf-8")
    if as_json_:
        render.emit_json(as_json(outcome, written))
    else:
        show(outcome, written)
    if written is None:
        raise typer.Exit(1)


def _model(argument: str | None) -> str:
    if argument is not None and argument.startswith(("http://", "https://")):
        raise LlmschedError(
            f"{argument}: the settings of a running server cannot be changed from here, so it cannot be tuned; "
            "give the model that it serves, and its load"
        )
    return resolve_model(argument)


def _knobs(text: str | None, options: EngineOptions) -> tuple[str, ...]:
    """The knobs to search, by default those that no flag fixes. A budget or a cap that is given is the largest.

    Raises LlmschedError for a knob that is to be searched and is fixed.
    """
    fixed = _FIXED & options.given.keys()
    if text is None:
        return tuple(knob for knob in KNOBS if knob not in fixed)
    chosen = parse_knobs(text)
    for knob in fixed.intersection(chosen):
        raise LlmschedError(
            f"--knobs {knob}: --{knob.replace('_', '-')} {options.given[knob]:g} fixes it; leave out one of them"
        )
    return chosen


def _check_smallest(smallest: int, options: EngineOptions) -> None:
    """Raise LlmschedError where the sweep of the token budget would be empty."""
    largest = options.given.get("max_num_batched_tokens")
    if largest is not None and smallest > largest:
        raise LlmschedError(f"--min-num-batched-tokens {smallest} is above --max-num-batched-tokens {largest}")


def _destination(output: str | None, model: str, simulate: str | None) -> Path:
    """Where the profile goes; checked before the work, not after it. What is simulated does not replace what is not."""
    called = Path(model_name(model)).name
    usual = f"{called}-{simulate}" if simulate else called
    name = output or re.sub(r"[^A-Za-z0-9._-]+", "-", usual).strip("-.") or "tuned"
    try:
        path = profile_path(name)
        check_writable(path)
    except ProfileError as problem:
        raise LlmschedError(f"--output: {problem}") from problem
    return path


def _save(outcome: Outcome, options: EngineOptions) -> Path | None:
    """Write the profile of the best setting, if there is one."""
    if (best := outcome.history.best()) is None:
        return None
    try:
        return save_profile(make_profile(outcome, best, options.given), str(outcome.task.destination))
    except ProfileError as problem:
        raise LlmschedError(f"--output: {problem}") from problem
