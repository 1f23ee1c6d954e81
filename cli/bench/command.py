"""`llmsched bench`: load a server or a model in this process, measure, report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from llmsched.cli import render
from llmsched.cli.bench.client import HttpOptions, HttpTarget, TargetUnreachableError
from llmsched.cli.bench.inprocess import EngineTarget, running_engine
from llmsched.cli.bench.load import Load
from llmsched.cli.bench.measure import Measurement, measure
from llmsched.cli.bench.options import (
    LoadOptions,
    ServerFlags,
    with_load_options,
    with_server_options,
    with_slo_options,
)
from llmsched.cli.bench.placing import CountTokens
from llmsched.cli.bench.prompts import COMMON_IDS, usable_ids
from llmsched.cli.bench.record import RequestFailed, RequestRecord
from llmsched.cli.bench.report import Subject, as_json, show
from llmsched.cli.bench.run import run_workload, warm_up
from llmsched.cli.options import EngineOptions, resolve_model, with_engine_options
from llmsched.engine.errors import LlmschedError
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress

_LOOKUP_TIMEOUT_S = 10.0

Outcome = tuple[Subject, Measurement]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to a target, whichever it is."""

    workload: Load
    slo: Slo
    timeout: float
    warmup: int | None


@with_engine_options(exclude=("seed",))
@with_server_options
@with_slo_options
@with_load_options(num_prompts=100, input_len=128, output_len=64)
def bench(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL or URL]",
            show_default="$LLMSCHED_MODEL, else demo",
            help="http://... of an OpenAI-compatible server, or a model to run in this process.",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            min=0,
            show_default="1 in this process, 0 for a URL",
            help="Requests sent before the run and not measured.",
            rich_help_panel="Load",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the JSON report to FILE as well.")
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    load_options: LoadOptions,
    slo: Slo,
    server: ServerFlags,
    engine_options: EngineOptions,
) -> None:
    """Load a server or a model and measure latency and goodput.

    With neither --request-rate nor --max-concurrency, all requests are sent at once. Exit code 1 if a request failed.
    """
    plan = Plan(load_options.load, slo, load_options.timeout, warmup)
    with render.progress_bar() as progress:
        if target is not None and target.startswith(("http://", "https://")):
            outcome = asyncio.run(
                _bench_server(_http_options(target, plan, server, engine_options), plan, server, progress)
            )
        else:
            _refuse_server_flags(server)
            outcome = asyncio.run(_bench_model(resolve_model(target), engine_options, plan, progress))
    report = as_json(*outcome)
    if save is not None:
        _write(save, report)
    if as_json_:
        render.emit_json(report)
    else:
        show(*outcome)
    if outcome[1].failed or not outcome[1].completed:
        raise typer.Exit(1)


async def _bench_model(model: str, options: EngineOptions, plan: Plan, progress: Progress) -> Outcome:
    config = options.config(model, {"max_queue_size": max(2048, plan.workload.num_requests)})
    warmup = 1 if plan.warmup is None else plan.warmup
    async with running_engine(config, progress) as engine:
        ids, target = usable_ids(engine.tokenizer, engine.model.vocab_size), EngineTarget(engine)
        await warm_up(target, plan.workload, warmup, ids=ids, timeout=plan.timeout)
        await engine.reset_prefix_cache()
        figures = await run_workload(target, plan.workload, plan.slo, ids=ids, timeout=plan.timeout, progress=progress)
        settings = {name: value for name, value in asdict(engine.config).items() if value is not None}
    return Subject(target.name, "in process", plan.workload, plan.slo, warmup, settings), figures


async def _bench_server(options: HttpOptions, plan: Plan, flags: ServerFlags, progress: Progress) -> Outcome:
    ids, count_tokens = _vocabulary(flags.tokenizer)
    target = HttpTarget(options)
    warmup = plan.warmup or 0
    try:
        await target.connect()
        words = options.endpoint == "chat" or flags.text_prompts
        await warm_up(target, plan.workload, warmup, ids=None if words else ids, timeout=plan.timeout)
        figures = await run_workload(
            target,
            plan.workload,
            plan.slo,
            ids=None if words else ids,
            timeout=plan.timeout,
            progress=progress,
            count_tokens=count_tokens,
        )
    except TargetUnreachableError as problem:
        figures = measure(_none_sent(plan.workload, str(problem)), plan.workload, plan.slo)
    finally:
        await target.close()
    return Subject(target.name, options.url, plan.workload, plan.slo, warmup), figures


def _none_sent(workload: Load, why: str) -> list[RequestRecord]:
    """The records of a run against a server that nobody can connect to."""
    failure = RequestFailed("connect", f"nothing was sent: {why}")
    return [RequestRecord(index, scheduled=0.0, failure=failure) for index in range(workload.num_requests)]


def _http_options(url: str, plan: Plan, flags: ServerFlags, engine_options: EngineOptions) -> HttpOptions:
    if engine_options.given:
        names = ", ".join("--" + name.replace("_", "-") for name in engine_options.given)
        raise LlmschedError(f"{names}: the settings of a running server cannot be changed from here")
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL as problem:
        raise LlmschedError(f"{url!r} is not a URL: {problem}") from problem
    if not host:
        raise LlmschedError(f"{url!r} names no host; write http://host:port")
    return HttpOptions(
        url,
        endpoint=flags.endpoint or "completions",
        model=flags.served_model_name,
        api_key=flags.api_key,
        ignore_eos=not flags.stop_at_eos,
        lookup_timeout=min(_LOOKUP_TIMEOUT_S, plan.timeout),
    )


def _refuse_server_flags(flags: ServerFlags) -> None:
    """OPENAI_API_KEY may stand in the environment for other reasons, so a key is no sign of a mistake."""
    given = [name for name, value in asdict(flags).items() if value and name != "api_key"]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise LlmschedError(f"{names}: only of use with the URL of a server, and the target is a model in this process")


def _vocabulary(model: str | None) -> tuple[Sequence[int], CountTokens | None]:
    """Ids to draw prompts from, and a counter of tokens where a tokenizer was named."""
    if model is None:
        return COMMON_IDS, None
    from llmsched.engine.model.load import load_tokenizer, locate

    known = load_tokenizer(locate(model))
    return usable_ids(known, known.vocab_size), lambda text: len(known.encode(text, add_special_tokens=False))


def _write(path: Path, report: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as problem:
        raise LlmschedError(f"--save {path}: {problem.strerror}") from problem
