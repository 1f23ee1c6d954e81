from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmsched.cli import render
from llmsched.cli.options.config_flags import DRAFT_KNOBS, EngineOptions, with_engine_options
from llmsched.cli.options.flags import ModelArgument, duration_option, resolve_model, simulate_option
from llmsched.cli.options.load_flags import LoadOptions, with_load_options
from llmsched.cli.options.slo_flags import with_slo_options
from llmsched.cli.output_files import check_file, writing
from llmsched.cli.quantities import server_url
from llmsched.cli.tune.knobs import KNOBS, parse_knobs
from llmsched.cli.tune.preference import best_trial
from llmsched.cli.tune.rate_search import JudgedBy
from llmsched.cli.tune.resume import state_path
from llmsched.cli.tune.trial_runs import Goal
from llmsched.cli.tune.trials import Trial
from llmsched.cli.tune.tune_json import as_json, make_profile
from llmsched.cli.tune.tune_report import page, say_profile, show
from llmsched.cli.tune.tuning import TuneOutcome, TuneTask, tune_engine, tune_simulated
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.planner import model_name
from llmsched.profiles.toml_files import ProfileError, check_writable
from llmsched.profiles.tuned import profile_path, save_profile

_ROUNDS = 3
#: Knobs that are not searched if their flag is given. The flag of any other knob sets the largest value tried.
_FIXED = frozenset({"headroom", "target_itl"})
_MOST_TOKENS = EngineConfig.knob_rule("max_num_batched_tokens")["high"]


@with_engine_options(exclude=("seed", "lora", *DRAFT_KNOBS))
@with_slo_options
@with_load_options(num_prompts=32, input_len=128, output_len=32, max_concurrency=4)
def tune(
    model: ModelArgument = None,
    maximize: Annotated[
        Goal,
        typer.Option(
            "--maximize",
            help="Rate to maximise among the settings that meet the SLOs: goodput (requests per second that met every "
            "SLO) or throughput (output tokens per second). Without an SLO, always throughput.",
        ),
    ] = "goodput",
    knobs: Annotated[
        str | None,
        typer.Option(
            "--knobs",
            metavar="NAMES",
            show_default=f"{','.join(KNOBS)}, except those fixed by a flag",
            help="Knobs to search, separated by commas. A knob that has no effect under this load is skipped.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds", min=1, show_default=str(_ROUNDS), help="Maximum number of full runs of each leading setting."
        ),
    ] = None,
    time_limit: Annotated[
        float,
        duration_option(
            "Time for the search, after the model has been loaded. A run that is not complete by then is dropped.",
            show_default="3min",
        ),
    ] = 180.0,
    min_num_batched_tokens: Annotated[
        int,
        typer.Option(
            "--min-num-batched-tokens",
            min=1,
            max=_MOST_TOKENS,
            metavar="TOKENS",
            help="Smallest token budget tried. --max-num-batched-tokens and --max-num-seqs limit the values tried.",
        ),
    ] = 32,
    rate: Annotated[
        JudgedBy,
        typer.Option(
            "--rate",
            help="knee: judge settings by the highest request rate at which they meet the SLOs, or under the given "
            "load if it is at or past the default's knee. given: judge them under exactly the given load, and show "
            "what happens at 1.5 and 2 times its rate. Without an SLO, always given.",
        ),
    ] = "knee",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted search; give the same flags."),
    ] = False,
    warm_start: Annotated[
        bool,
        typer.Option("--warm-start/--no-warm-start", help="Start from the latest profile of this model and device."),
    ] = True,
    simulate: Annotated[str | None, simulate_option("Search")] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write a report with charts to FILE (HTML, opens offline)."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="NAME|PATH",
            show_default="the model's name, with the simulated device",
            help="Profile to write. Without an SLO, a profile is written only with --output or after a question on a "
            "terminal.",
        ),
    ] = None,
    definitions: Annotated[
        bool, typer.Option("--definitions", help="Print at the end what the figures mean; --json always says it.")
    ] = False,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    load_options: LoadOptions,
    slo: Slo,
    engine_options: EngineOptions,
) -> None:
    """Find the settings that meet your latency targets at the highest request rate.

    Under a light load, all settings perform alike. So the command first finds the knee of the default setting, which
    is the highest request rate at which it meets the targets, and compares the settings at this rate. It tries powers
    of two for max_num_batched_tokens, then values of max_num_seqs, headroom and target_itl, and keeps the best setting
    each time. Every setting gets a short run, the better half gets a longer run, and the best few get full runs. Then
    the command raises the rate until no setting meets the targets. If the given load (by default 4 requests at a time)
    is past the default's knee, or with --rate given, it compares the settings under the given load by the rate that
    --maximize names. Among equal settings, the one with the larger margin to the targets wins, then the default. If the
    load is too light or the time too short to find a better setting, the default stays.

    With --simulate, every setting gets one full run, which gives the figures of `bench --simulate`. The winner is saved
    as a profile for `llmsched serve --profile`. Without targets, it is saved only with --output or, on a terminal, if
    you confirm. The exit code is 1 if no setting meets the targets.

    \b
    Examples:
      llmsched tune demo --slo-ttft 800ms --slo-itl 50ms
      llmsched tune demo --max-concurrency 16 --input-len 512 --slo-tpot 60ms --rate given --maximize throughput
      llmsched tune demo --request-rate 3 --knobs max_num_batched_tokens --time-limit 10min --output chat
      llmsched tune Qwen/Qwen3-8B --simulate h100 --workload azure-code --slo-ttft 2s --report curve.html
    """
    if report is not None:
        check_file("--report", report, load_options.trace)
    if simulate is not None and rounds is not None:
        raise LlmschedError("--rounds: a simulation gives the same figures each time; leave out --rounds or --simulate")
    load_options.load.check_shape()
    _check(model, engine_options, min_num_batched_tokens)
    name = resolve_model(model)
    task = TuneTask(
        model=name,
        options=engine_options,
        load=load_options.load,
        slo=slo,
        goal=maximize,
        knobs=_knobs(knobs, engine_options),
        timeout=load_options.timeout,
        rounds=rounds or _ROUNDS,
        time_limit=time_limit,
        smallest_budget=min_num_batched_tokens,
        destination=_destination(output, name, simulate),
        resume=resume,
        warm_start=warm_start,
        judged_by=rate,
    )
    asks = not as_json_ and output is None and not slo.given() and sys.stdin.isatty() and sys.stderr.isatty()
    writes = output is not None or bool(slo.given())
    _announce(task, writes, asks)
    outcome = _run(task, simulate)
    best = best_trial(outcome.history)
    if not as_json_:
        show(outcome, definitions=definitions)
    written = None if best is None else _save(outcome, best, task.destination, writes, asks)
    if report is not None:
        with writing("--report", report):
            report.write_text(page(outcome, written), encoding="utf-8")
    if as_json_:
        render.emit_json(as_json(outcome, written))
    else:
        say_profile(outcome, written)
    if best is None:
        raise typer.Exit(1)


def _check(model: str | None, options: EngineOptions, smallest_budget: int) -> None:
    largest = options.given.get("max_num_batched_tokens", _MOST_TOKENS)
    if smallest_budget > largest:
        raise LlmschedError(f"--min-num-batched-tokens {smallest_budget} is above --max-num-batched-tokens {largest}")
    if model is not None and server_url(model) is not None:
        raise LlmschedError(
            f"{model}: cannot tune a running server, because its settings cannot be changed from here; name the "
            "model that it serves instead"
        )


def _announce(task: TuneTask, writes: bool, asks: bool) -> None:
    if not task.slo.given():
        render.note(
            "no SLO given (--slo-ttft, --slo-itl, ...): the highest throughput under this load wins, whatever its "
            "latency"
        )
    if writes:
        render.note(f"the settings found will be written to {task.destination}")
    elif asks:
        render.note(f"at the end, you will be asked whether to write the settings to {task.destination}")
    else:
        render.note("no profile will be written, because no SLO is given; to write one, add --output NAME")


def _run(task: TuneTask, simulate: str | None) -> TuneOutcome:
    try:
        with render.progress_bar() as progress:
            job = tune_engine(task, progress) if simulate is None else tune_simulated(task, simulate, progress)
            return asyncio.run(job)
    except KeyboardInterrupt:
        if state_path(task.destination).exists():
            render.note("interrupted; to continue the search, run the same command with --resume")
        raise


def _save(outcome: TuneOutcome, best: Trial, destination: Path, writes: bool, asks: bool) -> Path | None:
    """Write the profile if it should be written, or if the user agrees. Return its path, or None."""
    question = f"write these settings to {destination}?"
    if not writes and not (asks and typer.confirm(question, default=True, err=True)):
        return None
    try:
        return save_profile(make_profile(outcome, best), str(destination))
    except ProfileError as problem:
        raise LlmschedError(f"--output: {problem}") from problem


def _knobs(text: str | None, options: EngineOptions) -> tuple[str, ...]:
    """Return the knobs in `text` (--knobs), or all knobs that no flag fixes. Raises LlmschedError for a fixed knob."""
    fixed = _FIXED & options.given.keys()
    if text is None:
        return tuple(knob for knob in KNOBS if knob not in fixed)
    chosen = parse_knobs(text)
    for knob in fixed.intersection(chosen):
        raise LlmschedError(
            f"--knobs {knob}: --{knob.replace('_', '-')} {options.given[knob]:g} fixes it; leave out one of them"
        )
    return chosen


def _destination(output: str | None, model: str, simulate: str | None) -> Path:
    called = Path(model_name(model)).name
    usual = f"{called}-{simulate}" if simulate else called
    name = output or re.sub(r"[^A-Za-z0-9._-]+", "-", usual).strip("-.") or "tuned"
    try:
        path = profile_path(name)
        check_writable(path)
    except ProfileError as problem:
        raise LlmschedError(f"--output: {problem}") from problem
    return path
