"""How a measurement is shown: a table with its definitions, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.load import Workload
from llmsched.cli.bench.measure import Measurement
from llmsched.engine.latency import DEFINITIONS, Slo, Summary


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured: its name, where it ran ("in process" or a URL), and the settings that were used."""

    name: str
    where: str
    workload: Workload
    slo: Slo
    warmup: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)


def as_json(subject: Subject, figures: Measurement) -> dict[str, Any]:
    """The measurement for scripts. Times are in milliseconds, rates per second; null is what the run cannot tell."""
    slo = {f"{name}_ms": limit * 1e3 for name, limit in subject.slo.given().items()}
    return {
        "measured": True,
        "target": subject.name,
        "where": subject.where,
        "completed": figures.completed,
        "failed": figures.failed,
        "failures": figures.failures,
        "failure_examples": figures.failure_examples,
        "valid": figures.valid,
        "duration_s": figures.duration,
        "input_tokens": figures.input_tokens,
        "output_tokens": figures.output_tokens,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "output_tokens_per_s_steady": figures.output_tokens_per_s_steady,
        "requests_per_s": figures.requests_per_s,
        "requests_per_s_steady": figures.requests_per_s_steady,
        "ttft_ms": _milliseconds(figures.ttft),
        "itl_ms": _milliseconds(figures.itl),
        "tpot_ms": _milliseconds(figures.tpot),
        "e2e_ms": _milliseconds(figures.e2e),
        "connect_ms": _milliseconds(figures.connect),
        "worst_stall_ms": None if figures.worst_stall is None else figures.worst_stall * 1e3,
        "prefix_hit_rate": figures.prefix_hit_rate,
        "preemptions": figures.preemptions,
        "asked_rate": figures.asked_rate,
        "achieved_rate": figures.achieved_rate,
        "client_lag_ms": _milliseconds(figures.client_lag),
        "goodput_rps": figures.goodput.requests_per_s if figures.goodput else None,
        "attainment": figures.goodput.attainment if figures.goodput else None,
        "slo": slo,
        "token_counts": figures.token_counts,
        "warnings": list(figures.warnings),
        "workload": {"load": subject.workload.describe(), **_finite(asdict(subject.workload))},
        "warmup": subject.warmup,
        "engine": dict(subject.engine),
        "definitions": dict(DEFINITIONS),
    }


def show(subject: Subject, figures: Measurement) -> None:
    """Print the measurement for a person."""
    work = subject.workload
    render.say(
        f"MEASURED {subject.name} ({subject.where}): {work.num_prompts} requests, {work.input_len} tokens in, "
        f"{work.output_len} out, {work.describe()}, seed {work.seed}"
    )
    rows = [
        _latency_row(name, summary)
        for name, summary in (
            ("TTFT", figures.ttft),
            ("ITL", figures.itl),
            ("TPOT", figures.tpot),
            ("E2E", figures.e2e),
        )
    ]
    render.table("latency in ms", ["", "mean", "P50", "P95", "P99", "max", "samples"], rows)
    render.table("", ["", ""], _total_rows(figures))
    if figures.goodput:
        _show_goodput(subject.slo, figures)
    for name in ("TTFT", "ITL", "TPOT", "E2E", *(["goodput"] if figures.goodput else []), "percentiles"):
        render.say(f"{name}: {DEFINITIONS[name]}")
    if figures.token_counts:
        render.say(f"token counts: {figures.token_counts}")
    for reason, count in figures.failures.items():
        detail = figures.failure_examples[reason]
        render.error(f"{count} of {work.num_prompts} requests failed: {reason}{f' ({detail})' if detail else ''}")
    for warning in figures.warnings:
        render.warn(warning)


def _total_rows(figures: Measurement) -> list[list[str]]:
    asked = "" if figures.asked_rate is None else f" (asked {figures.asked_rate:g})"
    return [
        ["completed / failed", f"{figures.completed} / {figures.failed}"],
        ["duration", f"{figures.duration:.2f} s"],
        ["output tokens/s", _rate(figures.output_tokens_per_s)],
        ["  between first and last token", _rate(figures.output_tokens_per_s_steady)],
        ["requests/s", _rate(figures.requests_per_s)],
        ["  between first and last end", _rate(figures.requests_per_s_steady)],
        ["sent requests/s", _rate(figures.achieved_rate) + asked],
        ["prefix hit rate", "n/a" if figures.prefix_hit_rate is None else f"{figures.prefix_hit_rate:.1%}"],
        ["preemptions", "n/a" if figures.preemptions is None else str(figures.preemptions)],
        ["worst stall", "n/a" if figures.worst_stall is None else render.human_seconds(figures.worst_stall)],
        ["client lag P99", "n/a" if figures.client_lag.p99 is None else render.human_seconds(figures.client_lag.p99)],
    ]


def _show_goodput(slo: Slo, figures: Measurement) -> None:
    assert figures.goodput is not None
    attainment = figures.goodput.attainment
    rows = [[name.upper(), f"{limit * 1e3:g} ms", f"{attainment[name]:.1%}"] for name, limit in slo.given().items()]
    rows.append(["all", "", f"{attainment['all']:.1%}"])
    render.say(f"goodput {figures.goodput.requests_per_s:.3g} requests/s")
    render.table("", ["SLO", "limit", "met by"], rows)


def _latency_row(name: str, summary: Summary) -> list[str]:
    figures = (summary.mean, summary.p50, summary.p95, summary.p99, summary.max)
    return [name, *("n/a" if value is None else f"{value * 1e3:.1f}" for value in figures), str(summary.count)]


def _rate(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _milliseconds(summary: Summary) -> dict[str, float | int | None]:
    times = {name: value for name, value in asdict(summary).items() if name != "count"}
    return {
        **{name: None if value is None else value * 1e3 for name, value in times.items()},
        "count": summary.count,
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: the rate "all at once" becomes null, as `load` says it in words."""
    return {name: None if value == float("inf") else value for name, value in values.items()}
