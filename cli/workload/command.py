from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.load.prompts import load_encoder
from llmsched.cli.load.traces.read import read_trace
from llmsched.cli.options.config_flags import serve_command
from llmsched.cli.options.flags import with_options
from llmsched.cli.options.load_flags import LoadFlags, TraceFlags, make_load
from llmsched.cli.workload.load_analysis import RUNNING, LoadAnalysis, analyse, serve_knobs
from llmsched.cli.workload.request_sample import RequestSample, sample_load, sample_trace
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.profiles.shipped_workloads import workloads

#: Maximum number of characters shown of an example of the prefix to pin.
_SHOWN = 70
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
    line = serve_command(tokenizer, serve_knobs(found))
    if json_:
        render.emit_json(_as_json(found) | {"serve": line})
    else:
        _show(found)
        render.say(line, wrap=False)


def _sample(name: str, tokenizer: str | None, flags: TraceFlags) -> RequestSample:
    shipped = workloads().get(name)
    if shipped is not None and shipped.file is None:
        if tokenizer is not None or flags.reading():
            raise LlmschedError(f"{name} is drawn, not read from a file; only --block-size and --json apply to it")
        return sample_load(name, make_load(LoadFlags(workload=name), {"num_prompts": 1000}))
    path = Path(name) if shipped is None or shipped.file is None else shipped.file
    if shipped is None and not path.exists():
        raise LlmschedError(f"{name} is neither a file nor a load that comes with llmsched: {', '.join(workloads())}")
    trace = read_trace(path, name=name if shipped else None, **flags.reading())
    if tokenizer is None:
        return sample_trace(trace, None, None)
    if not trace.of_text:
        raise ConfigError("tokenizer", f"{tokenizer} has no effect: {name} states lengths, not texts; leave it out")
    return sample_trace(trace, load_encoder(tokenizer), tokenizer)


def _as_json(found: LoadAnalysis) -> dict[str, Any]:
    sample, advice = found.sample, asdict(found.advice)
    by_running = advice["headroom_by_running"]
    return {
        "name": sample.name,
        "format": sample.format,
        "requests": len(sample.inputs),
        "tokens": sample.tokens,
        "notes": list(sample.notes),
        "block_size": found.block_size,
        "input_len": _plain(found.input),
        "output_len": _plain(found.output),
        "total_len": _plain(found.total),
        "arrivals": _plain(found.arrivals),
        "prefixes": _plain(found.prefixes),
        "advice": {**advice, "headroom": None if by_running is None else by_running[RUNNING[1]]},
    }


def _plain(figures: Any) -> dict[str, Any] | None:
    return None if figures is None else asdict(figures)


def _show(found: LoadAnalysis) -> None:
    sample = found.sample
    facts = [f"{len(sample.inputs):,} requests", f"lengths in tokens ({sample.tokens})", *sample.notes]
    render.say(f"{sample.name} ({sample.format}): {'; '.join(facts)}")
    lengths = (("prompt", found.input), ("answer", found.output), ("total", found.total))
    rows = []
    for name, each in lengths:
        if each is not None:
            values = (each.mean, each.p50, each.p75, each.p90, each.p95, each.p99, each.max)
            rows.append([name, *(f"{value:,.0f}" for value in values), f"{each.tail:.2f}"])
    render.table(
        "tokens",
        ["", "mean", "P50", "P75", "P90", "P95", "P99", "max", "P99/mean"],
        rows,
        spare=("mean", "P75", "P90", "P95"),
    )
    if found.arrivals is not None:
        arrivals = found.arrivals
        rows = [["all at the same time", ""]]
        if arrivals.rate is not None:
            peak = "n/a" if arrivals.peak_over_mean is None else f"{arrivals.peak_over_mean:.2f} times the mean"
            rows = [
                ["duration", render.human_seconds(arrivals.duration_s)],
                ["requests/s", f"{arrivals.rate:.3g}"],
                ["coefficient of variation of gaps (Poisson: 1)", f"{arrivals.gap_cv:.2f}"],
                ["busiest 10 s", peak],
            ]
        render.table("arrivals", ["", ""], rows)
    if (prefixes := found.prefixes) is not None:
        rows = [
            [f"{row.tokens:,}", f"{'' if row.exact or row.share in (0, 1) else 'at least '}{row.share:.1%}"]
            for row in prefixes.coverage
        ]
        render.table("most frequent prefix", ["tokens", "requests that share it"], rows, text_columns=0)
        render.say(
            f"ideal prefix hit rate {prefixes.hit_rate:.1%} of prompt tokens, with blocks of {found.block_size} and an "
            f"unlimited cache, which would hold {prefixes.distinct_tokens:,} tokens"
        )
    for line in _recommendations(found):
        render.say(line)


def _recommendations(found: LoadAnalysis) -> list[str]:
    advice = found.advice
    refused = f"half that length would refuse {advice.refused_by_half:.2%} of requests"
    lines = [f"max_model_len {advice.max_model_len}: fits the longest request; {refused}"]
    if (shares := advice.headroom_by_running) is not None:
        told = ", ".join(f"{share:.1%} with {running} running" for running, share in shares.items())
        lines.append(
            f"headroom {shares[RUNNING[1]]:.3f}: share of KV blocks to keep free, so that answers longer than expected "
            f"find room in 99 % of cases ({told})"
        )
    if (prefixes := found.prefixes) is None:
        return [*lines, "prefix caching: unknown, because the load does not state which prefixes its prompts share"]
    saved = f"{prefixes.hit_rate:.1%} of prompt tokens"
    if not advice.prefix_caching:
        return [*lines, f"prefix caching: not worthwhile, it saves at most {saved}"]
    lines.append(f"prefix caching: worthwhile, it saves up to {saved}")
    if (pin := prefixes.pin) is None:
        return [*lines, "pinned prefixes: none, because no prefix is shared by enough requests"]
    share, texts = pin.requests / len(found.sample.inputs), found.sample.texts
    example = "" if texts is None else f", such as {' '.join(texts[pin.example].split())[:_SHOWN]!r}..."
    return [
        *lines,
        f"pinned prefixes: pin the first {pin.tokens:,} tokens, which {share:.1%} of requests share{example} "
        "(serve --pin-prefix)",
    ]
