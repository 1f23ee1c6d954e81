"""`llmsched workload`: figures of a load, and the settings that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmsched.cli import render
from llmsched.cli.load.prompts import load_encoder
from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.options.flags import with_options
from llmsched.cli.options.load_flags import LoadFlags, TraceFlags, make_load
from llmsched.cli.workload.load_analysis import analyse
from llmsched.cli.workload.request_sample import RequestSample, sample_load, sample_trace
from llmsched.cli.workload.workload_report import as_json, show
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.profiles.shipped_workloads import workloads

#: The number of requests drawn from a synthetic load.
_DRAWN = 1000
_LARGEST_BLOCK = EngineConfig.knob_rule("block_size")["high"]


@with_options("trace_flags", TraceFlags)
def workload(
    name: Annotated[
        str,
        typer.Argument(
            metavar="FILE|NAME",
            help=f"A trace, as for bench --trace, or a load that comes with llmsched: {', '.join(workloads())}.",
        ),
    ],
    block_size: Annotated[
        int, typer.Option(min=1, max=_LARGEST_BLOCK, help="Tokens per KV block, for the hit rate of the prefix cache.")
    ] = 16,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Count texts in tokens of this model; by default, in words."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    trace_flags: TraceFlags,
) -> None:
    """Analyse a load: lengths, arrivals and shared prefixes. Recommend max_model_len, headroom, prefix caching and
    prefixes to pin.

    \b
    Examples:
      llmsched workload requests.jsonl --tokenizer Qwen/Qwen3-8B
      llmsched workload mooncake-conversation --block-size 16
      llmsched workload azure-code --json
    """
    found = analyse(_sample(name, tokenizer, trace_flags), block_size)
    if json_:
        render.emit_json(as_json(found))
    else:
        show(found)


def _sample(name: str, tokenizer: str | None, flags: TraceFlags) -> RequestSample:
    """Return the requests of a file, or of a shipped load."""
    shipped = workloads().get(name)
    if shipped is not None and shipped.file is None:
        if tokenizer is not None or flags.reading():
            raise LlmschedError(f"{name} is drawn, not read from a file; only --block-size and --json apply to it")
        return sample_load(name, make_load(LoadFlags(workload=name), {"num_prompts": _DRAWN}))
    path = Path(name) if shipped is None or shipped.file is None else shipped.file
    if shipped is None and not path.exists():
        raise LlmschedError(f"{name} is neither a file nor a load that comes with llmsched: {', '.join(workloads())}")
    trace = read_trace(path, name=name if shipped else None, **flags.reading())
    if tokenizer is None:
        return sample_trace(trace, None, None)
    if not trace.of_text:
        raise ConfigError("tokenizer", f"{tokenizer} has no effect: {name} states lengths, not texts; leave it out")
    return sample_trace(trace, load_encoder(tokenizer), tokenizer)
