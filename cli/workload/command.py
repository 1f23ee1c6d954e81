"""`llmsched workload`: what a load is like, and which settings follow from that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmsched.cli import render
from llmsched.cli.load.prompts import Encode, TokenizerEncode
from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.options.load import make_load
from llmsched.cli.options.load_flags import (
    LimitOption,
    LoadFlags,
    TimestampUnitOption,
    TraceBlockSizeOption,
    TraceFormatOption,
    TurnsOption,
)
from llmsched.cli.workload.advice import advise
from llmsched.cli.workload.figures import arrival_figures, length_figures
from llmsched.cli.workload.prefixes import prefix_figures
from llmsched.cli.workload.report import Analysis, as_json, show
from llmsched.cli.workload.sample import Sample, sample_load, sample_trace
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import LlmschedError, ModelError
from llmsched.profiles.shipped_workloads import workloads

#: Requests that are drawn of a synthetic load.
_DRAWN = 1000
_LARGEST_BLOCK = EngineConfig.knob_rule("block_size")["high"]


def workload(
    name: Annotated[
        str,
        typer.Argument(
            metavar="FILE|NAME",
            help=f"A trace, as for bench --trace, or a load that is shipped: {', '.join(workloads())}.",
        ),
    ],
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, max=_LARGEST_BLOCK, help="Tokens of one KV block.")
    ] = 16,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="MODEL",
            show_default=False,
            help="Whose tokens to count in texts; without it, a word is a token.",
        ),
    ] = None,
    limit: LimitOption = None,
    trace_format: TraceFormatOption = None,
    timestamp_unit: TimestampUnitOption = None,
    turns: TurnsOption = None,
    trace_block_size: TraceBlockSizeOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Analyse a load: lengths, arrivals, shared beginnings of prompts; and what max_model_len, headroom, prefix cache
    and pins should be.

    \b
    Examples:
      llmsched workload requests.jsonl --tokenizer Qwen/Qwen3-8B
      llmsched workload mooncake-conversation --block-size 16
      llmsched workload azure-code --json
    """
    shipped = workloads().get(name)
    if shipped is not None and shipped.file is None:
        _refuse_reading(name, tokenizer, limit, trace_format, timestamp_unit, turns, trace_block_size)
        sample = sample_load(name, make_load(LoadFlags(workload=name), {"num_prompts": _DRAWN}))
    else:
        path = Path(name) if shipped is None or shipped.file is None else shipped.file
        if shipped is None and not path.exists():
            raise LlmschedError(f"{name} is neither a file nor a load that is shipped: {', '.join(workloads())}")
        trace = read_trace(
            path,
            trace_format,
            unit=timestamp_unit,
            turns=turns,
            block_tokens=trace_block_size,
            limit=limit,
            name=name if shipped else None,
        )
        if tokenizer is not None and not trace.of_text:
            raise LlmschedError(f"--tokenizer {tokenizer}: {name} has no texts but lengths in tokens; leave it out")
        encode = None if tokenizer is None else _encode(tokenizer)
        sample = sample_trace(trace, encode, tokenizer)
    found = _analyse(sample, block_size)
    if json_:
        render.emit_json(as_json(found))
    else:
        show(found)


def _refuse_reading(name: str, *flags: object) -> None:
    if any(flag is not None for flag in flags):
        raise LlmschedError(f"{name} is drawn, not read: of the flags, only --block-size and --json are of use to it")


def _encode(model: str) -> Encode:
    from llmsched.engine.model.loader import load_tokenizer
    from llmsched.engine.model.source import locate

    try:
        return TokenizerEncode(load_tokenizer(locate(model)))
    except ModelError as problem:
        raise LlmschedError(f"--tokenizer: {problem}") from problem


def _analyse(sample: Sample, block_size: int) -> Analysis:
    known = [answer for answer in sample.outputs if answer is not None]
    both = [given + answer for given, answer in zip(sample.inputs, sample.outputs, strict=True) if answer is not None]
    prefixes = prefix_figures(sample, block_size)
    return Analysis(
        sample=sample,
        block_size=block_size,
        input=length_figures(sample.inputs),
        output=length_figures(known),
        total=length_figures(both),
        arrivals=None if sample.offsets is None else arrival_figures(sample.offsets),
        prefixes=prefixes,
        advice=advise(sample, prefixes),
    )
