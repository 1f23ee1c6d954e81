"""Output of `llmsched workload`: tables and recommendations, or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmsched.cli import render
from llmsched.cli.workload.load_analysis import RUNNING, ArrivalFigures, LoadAnalysis

#: Characters shown of an example of the prefix to pin.
_SHOWN = 70


def as_json(found: LoadAnalysis) -> dict[str, Any]:
    """Return the analysis for scripts: lengths in tokens, shares from 0 to 1, times in seconds."""
    sample, advice = found.sample, asdict(found.advice)
    by_running = advice["headroom_by_running"]
    return {
        "name": sample.name,
        "format": sample.format,
        "requests": len(sample.inputs),
        "tokens": sample.tokens,
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


def show(found: LoadAnalysis) -> None:
    """Print tables and recommendations."""
    sample = found.sample
    render.say(f"{sample.name} ({sample.format}): {len(sample.inputs):,} requests; tokens {sample.tokens}")
    lengths = (("prompt", found.input), ("answer", found.output), ("both", found.total))
    rows = []
    for name, each in lengths:
        if each is not None:
            values = (each.mean, each.p50, each.p75, each.p90, each.p95, each.p99, each.max)
            rows.append([name, *(f"{value:,.0f}" for value in values), f"{each.tail:.2f}"])
    render.table("tokens", ["", "mean", "P50", "P75", "P90", "P95", "P99", "max", "P99/mean"], rows)
    if found.arrivals is not None:
        render.table("arrivals", ["", ""], _arrival_rows(found.arrivals))
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


def _arrival_rows(figures: ArrivalFigures) -> list[list[str]]:
    if figures.rate is None:
        return [["all at the same time", ""]]
    peak = "n/a" if figures.peak_over_mean is None else f"{figures.peak_over_mean:.2f} times the mean"
    return [
        ["duration", render.human_seconds(figures.duration_s)],
        ["requests/s", f"{figures.rate:.3g}"],
        ["coefficient of variation of gaps (Poisson: 1)", f"{figures.gap_cv:.2f}"],
        ["busiest 10 s", peak],
    ]


def _recommendations(found: LoadAnalysis) -> list[str]:
    advice = found.advice
    refused = f"half of it would refuse {advice.refused_by_half:.2%} of requests"
    lines = [f"max_model_len {advice.max_model_len}: fits the longest request; {refused}"]
    if (shares := advice.headroom_by_running) is not None:
        told = ", ".join(f"{share:.1%} with {running} running" for running, share in shares.items())
        lines.append(
            f"headroom {shares[RUNNING[1]]:.3f}: share of KV blocks to keep free, so that answers longer than expected "
            f"find room in 99 % of cases ({told})"
        )
    if (prefixes := found.prefixes) is None:
        return [*lines, "prefix caching: unknown, because the load does not say what its prompts share"]
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
