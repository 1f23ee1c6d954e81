"""How an analysis is shown: tables and advice in sentences, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmsched.cli import render
from llmsched.cli.workload.advice import RUNNING, Advice
from llmsched.cli.workload.figures import ArrivalFigures, LengthFigures
from llmsched.cli.workload.prefixes import PrefixFigures
from llmsched.cli.workload.sample import Sample

#: Characters of a prompt's beginning that are shown.
_SHOWN = 70


@dataclass(frozen=True, slots=True)
class Analysis:
    """All that was found out about a load. None: the load does not tell."""

    sample: Sample
    block_size: int
    input: LengthFigures | None
    output: LengthFigures | None
    total: LengthFigures | None
    arrivals: ArrivalFigures | None
    prefixes: PrefixFigures | None
    advice: Advice


def as_json(found: Analysis) -> dict[str, Any]:
    """The analysis for scripts. Lengths are in tokens, shares from 0 to 1, times in seconds."""
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


def show(found: Analysis) -> None:
    """Print the analysis for a person."""
    sample = found.sample
    render.say(f"{sample.name} ({sample.format}): {len(sample.inputs):,} requests; tokens {sample.tokens}")
    lengths = (("prompt", found.input), ("answer", found.output), ("both", found.total))
    rows = [_length_row(name, figures) for name, figures in lengths if figures is not None]
    render.table("tokens", ["", "mean", "P50", "P75", "P90", "P95", "P99", "max", "P99/mean"], rows)
    if found.arrivals is not None:
        render.table("arrivals", ["", ""], _arrival_rows(found.arrivals))
    if found.prefixes is not None:
        _show_prefixes(found.prefixes, found.block_size)
    for line in _sentences(found):
        render.say(line)


def _length_row(name: str, figures: LengthFigures) -> list[str]:
    values = (figures.mean, figures.p50, figures.p75, figures.p90, figures.p95, figures.p99, figures.max)
    return [name, *(f"{value:,.0f}" for value in values), f"{figures.tail:.2f}"]


def _arrival_rows(figures: ArrivalFigures) -> list[list[str]]:
    if figures.rate is None:
        return [["all at one time", ""]]
    peak = "n/a" if figures.peak_over_mean is None else f"{figures.peak_over_mean:.2f} times the mean"
    return [
        ["duration", render.human_seconds(figures.duration_s)],
        ["requests/s", f"{figures.rate:.3g}"],
        ["variation of gaps (1 is Poisson)", f"{figures.gap_cv:.2f}"],
        ["busiest 10 s", peak],
    ]


def _show_prefixes(figures: PrefixFigures, block_size: int) -> None:
    rows = [
        [f"{row.tokens:,}", f"{'' if row.exact or row.share in (0, 1) else 'at least '}{row.share:.1%}"]
        for row in figures.coverage
    ]
    render.table("the most frequent beginning", ["tokens", "requests that have it"], rows, text_columns=0)
    render.say(
        f"ideal hit rate {figures.hit_rate:.1%}: of prompt tokens, with blocks of {block_size} and an unlimited cache, "
        f"which would hold {figures.distinct_tokens:,} tokens"
    )


def _sentences(found: Analysis) -> Sequence[str]:
    advice = found.advice
    refused = f"half of it would refuse {advice.refused_by_half:.2%} of requests"
    lines = [f"max_model_len {advice.max_model_len}: the longest request fits; {refused}"]
    if (shares := advice.headroom_by_running) is not None:
        told = ", ".join(f"{share:.1%} with {running}" for running, share in shares.items())
        lines.append(
            f"headroom {shares[RUNNING[1]]:.3f}: by how much the answers of running requests outgrow what is expected "
            f"of them, in the worst 1 % of cases, as a share of the blocks ({told} running at the same time)"
        )
    if found.prefixes is None:
        lines.append("prefix caching: the load does not say what its prompts share")
    else:
        lines += _prefix_sentences(found.sample, found.prefixes, bool(advice.prefix_caching))
    return lines


def _prefix_sentences(sample: Sample, figures: PrefixFigures, pays: bool) -> list[str]:
    if not pays:
        return [f"prefix caching: does not pay, at most {figures.hit_rate:.1%} of prompt tokens come again"]
    lines = [f"prefix caching: pays, up to {figures.hit_rate:.1%} of prompt tokens need not be computed"]
    if (pin := figures.pin) is None:
        return [*lines, "nothing to pin: no beginning is that of enough requests"]
    share = pin.requests / len(sample.inputs)
    begins = "" if sample.begins is None else f", as in {' '.join(sample.begins[pin.example].split())[:_SHOWN]!r}..."
    return [*lines, f"to pin: the first {pin.tokens:,} tokens of {share:.1%} of requests{begins} (serve --pin-prefix)"]
