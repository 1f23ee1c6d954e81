from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Coroutine
from dataclasses import replace
from typing import Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.modes import bench_compare, bench_target
from llmsched.cli.bench.report.output_flags import OutputFlags
from llmsched.cli.bench.report.report_content import Result
from llmsched.cli.bench.selfcheck.self_check import bench_self
from llmsched.cli.options.config_flags import EngineOptions, with_engine_options
from llmsched.cli.options.flags import quantization_option, resolve_model, simulate_option, typed_options, with_options
from llmsched.cli.options.load_flags import LoadOptions, with_load_options
from llmsched.cli.options.slo_flags import with_slo_options
from llmsched.cli.options.url_target_flags import UrlTargetFlags, http_options, refuse_url_target_flags
from llmsched.cli.profiles.apply import profile_warnings, with_profile
from llmsched.cli.quantities import server_url
from llmsched.cli.targets.engine_target import open_engine
from llmsched.cli.targets.http_target import open_server
from llmsched.cli.targets.interface import RunPlan
from llmsched.cli.targets.simulated_target import open_simulated
from llmsched.engine.architecture.online_formats import ONLINE_FORMATS
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import Progress


@with_engine_options(exclude=("seed", "quantization"), uses={"lora": "repeatable: requests use the adapters in turn"})
@with_options("server", UrlTargetFlags)
@with_options("outputs", OutputFlags)
@with_options("modes", ModeFlags)
@with_slo_options
@with_load_options(num_prompts=100, input_len=128, output_len=64)
def bench(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL or URL",
            show_default="$LLMSCHED_MODEL, else demo",
            help="http://HOST:PORT of an OpenAI-compatible server, or a model to run in this process.",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            min=0,
            show_default="1 in this process, 0 for a URL",
            help="Requests sent before the run and not measured.",
        ),
    ] = None,
    simulate: Annotated[str | None, simulate_option("Run the scheduler alone,")] = None,
    quantization: Annotated[
        str | None, quantization_option("Round the weights while loading", "With --simulate: simulate")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|PATH",
            show_default=False,
            help="Settings found by `llmsched tune`, for a model in this process or simulated; flags override them.",
        ),
    ] = None,
    *,
    load_options: LoadOptions,
    slo: Slo,
    modes: ModeFlags,
    outputs: OutputFlags,
    server: UrlTargetFlags,
    engine_options: EngineOptions,
) -> None:
    """Send a load to a server or a model, and measure latency and goodput.

    The requests of a trace are sent at the times that the trace states. Without a trace, --request-rate or
    --max-concurrency, all requests are sent at once. Each run sends new prompts to a server, so that the server's
    prefix cache does not hold them; --prompt-seed repeats prompts. Ctrl-C ends a run and reports the requests completed
    by then. The exit code is 1 if a request failed, if a figure is worse than in a saved run (--against), if no rate
    meets the SLOs (--find-knee), or if a figure is wrong or this machine was too busy to tell (--self-check).

    \b
    Examples:
      llmsched bench demo --max-concurrency 8 --input-len 128 --output-len 64
      llmsched bench http://localhost:8000 --request-rate 4 --slo-ttft 800ms --slo-itl 50ms --json
      llmsched bench demo --workload chat --request-rate 2 --burstiness 0.5 --duration 1min
      llmsched bench http://localhost:8000 --trace requests.jsonl --speedup 2 --limit 500
      llmsched bench demo --compare static,continuous --output-len 16..512
      llmsched bench demo --compare "fair, fair max_num_batched_tokens=512, fair headroom=0" --rounds 3
      llmsched bench http://localhost:8000 --find-knee --slo-ttft 1s --slo-tpot 100ms
      llmsched bench demo --request-rate 2 --report run.html --save-detailed run.jsonl --csv runs.csv
      llmsched bench demo --save before.json; llmsched bench demo --against before.json
      llmsched bench demo --profile demo --request-rate 2
      llmsched bench --self-check
      llmsched bench Qwen/Qwen3-8B --simulate h100 --workload azure-code
      llmsched bench Qwen/Qwen3-8B --simulate h100 --replicas 8 --router prefix --trace requests.jsonl
      llmsched bench Qwen/Qwen3-8B --simulate h100:vllm --quantization fp8_block --max-concurrency 64
    """
    outputs.check(modes, load_options.trace)
    engine_options = _with_quantization(engine_options, quantization, simulate)
    typed = typed_options(context)
    if simulate is None and (extra := {"--replicas", "--router"} & set(typed)):
        raise LlmschedError(f"{', '.join(sorted(extra))}: applies only to --simulate; leave it out, or add --simulate")
    if not modes.find_knee:
        load_options.load.check_shape()
    plan = RunPlan(
        load_options.load, slo, load_options.timeout, warmup, outputs.save_detailed is not None, modes.one_run
    )
    earlier = outputs.earlier(plan.workload, measured=simulate is None)
    url = None if target is None else server_url(target)
    with render.progress_bar() as progress:
        if modes.self_check:
            if extra := set(typed) - {"--self-check", "--save", "--json"}:
                raise LlmschedError(f"--self-check uses its own server and load; leave out {', '.join(sorted(extra))}")
            job = bench_self(progress)
        elif url is not None:
            _check_server_flags(url, modes, profile, simulate)
            if "--prompt-seed" not in typed:  # the server's prefix cache outlives this run
                plan = replace(plan, workload=replace(plan.workload, prompt_seed=secrets.randbits(31) + 1))
            opening = open_server(http_options(url, plan, server, engine_options), plan)
            job = bench_target(opening, url, modes, plan, progress)
        else:
            refuse_url_target_flags(typed)
            options = with_profile(engine_options, profile)
            job = _bench_model(resolve_model(target), options, modes, plan, progress, profile, simulate, quantization)
        result = asyncio.run(job)
    as_before = outputs.give_out(result, earlier)
    if result.run is not None and result.run.figures.run.interrupted:
        raise typer.Exit(128 + signal.SIGINT)
    if not result.well or not as_before:
        raise typer.Exit(1)


def _with_quantization(options: EngineOptions, quantization: str | None, simulate: str | None) -> EngineOptions:
    """Return the options, with --quantization as a setting unless it is the format of a simulated checkpoint."""
    if quantization is None or simulate is not None:
        return options
    if quantization not in ONLINE_FORMATS:
        formats = ", ".join(ONLINE_FORMATS)
        raise ConfigError("quantization", f"{quantization} needs --simulate; without it, allowed is {formats}")
    return replace(options, given={**options.given, "quantization": quantization})


def _check_server_flags(url: str, modes: ModeFlags, profile: str | None, simulate: str | None) -> None:
    """Raise LlmschedError for flags that do not apply to a running server."""
    if profile is not None:
        raise LlmschedError(f"--profile {profile}: the settings of a running server cannot be changed from here")
    if simulate is not None:
        raise LlmschedError(f"--simulate {simulate}: a running server is measured, not simulated; name a model")
    if modes.compare is not None:
        raise LlmschedError(
            f"--compare runs each variant in this process, and {url} is a server, whose settings cannot be changed "
            "from here; name a model, or restart the server with each setting and bench it with the same --seed"
        )


def _bench_model(
    model: str,
    options: EngineOptions,
    modes: ModeFlags,
    plan: RunPlan,
    progress: Progress,
    profile: str | None,
    simulate: str | None,
    quantization: str | None,
) -> Coroutine[Any, Any, Result]:
    """Prepare a run against a model in this process or, with `simulate`, against its simulation."""
    if profile is not None:
        for warning in profile_warnings(profile, options.config(model), simulate):
            render.warn(warning)
    config = options.config(model, {"max_queue_size": max(2048, plan.workload.num_requests)})
    replication = modes.replication
    if modes.compare is not None:
        return bench_compare(config, options.given, simulate, modes, plan, progress, quantization, replication)
    if simulate is None:
        opening = open_engine(config, plan, progress)
    else:
        opening = open_simulated(config, simulate, plan, progress, render.warn, quantization, replication)
    return bench_target(opening, None, modes, plan, progress)
