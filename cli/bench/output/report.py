"""How a measurement is shown: a table with its definitions, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.output import tables
from llmsched.cli.bench.output.charts import distributions, latency_over_time
from llmsched.cli.figures import memory
from llmsched.cli.figures.measure import Measurement, Reading, RequestStall
from llmsched.cli.load.load import Load
from llmsched.engine.latency import DEFINITIONS, Slo, Summary
from llmsched.engine.provenance import Provenance

#: Requests from which on a chart shows more than the table does.
_ENOUGH_TO_DRAW = 10


@dataclass(frozen=True, slots=True)
class Subject:
    """The target of a run, the load and SLOs it ran under, and the engine settings used."""

    name: str
    provenance: Provenance
    workload: Load
    slo: Slo
    warmup: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)


def as_json(subject: Subject, figures: Measurement) -> dict[str, Any]:
    """The measurement for scripts. Times are in milliseconds, rates per second; null is what the run cannot tell."""
    slo: dict[str, Any] = {f"{name}_ms": limit * 1e3 for name, limit in subject.slo.given().items()}
    if "itl_ms" in slo:
        slo["itl_statistic"] = subject.slo.itl_statistic
    return {
        **subject.provenance.as_json(),
        "target": subject.name,
        "completed": figures.completed,
        "failed": figures.failed,
        "failures": figures.failures,
        "failure_examples": figures.failure_examples,
        "valid": figures.valid,
        "interrupted": figures.interrupted,
        "duration_s": figures.duration,
        "input_tokens": figures.input_tokens,
        "output_tokens": figures.output_tokens,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "output_tokens_per_s_steady": figures.output_tokens_per_s_steady,
        "requests_per_s": figures.requests_per_s,
        "requests_per_s_steady": figures.requests_per_s_steady,
        "steady_window_s": figures.steady_window,
        "ttft_ms": _latency(figures, "ttft"),
        "itl_ms": _latency(figures, "itl"),
        "tpot_ms": _latency(figures, "tpot"),
        "e2e_ms": _latency(figures, "e2e"),
        "connect_ms": _milliseconds(figures.connect),
        "worst_stall_ms": None if figures.worst_stall is None else figures.worst_stall * 1e3,
        "worst_stalls": [_stall(one) for one in figures.stalls],
        "prefix_hit_rate": figures.prefix_hit_rate,
        "preemptions": figures.preemptions,
        "asked_rate": figures.asked_rate,
        "scheduled_rate": figures.scheduled_rate,
        "achieved_rate": figures.achieved_rate,
        "client_lag_ms": _milliseconds(figures.client_lag),
        "loop_lag_ms": None if figures.loop_lag is None else _milliseconds(figures.loop_lag),
        "machine_lag_ms": None if figures.machine_lag is None else _milliseconds(figures.machine_lag),
        "goodput_rps": figures.goodput.requests_per_s if figures.goodput else None,
        "attainment": figures.goodput.attainment if figures.goodput else None,
        "slo": slo,
        "slo_missed": figures.goodput.missed if figures.goodput else None,
        "slo_missed_alone": figures.goodput.missed_alone if figures.goodput else None,
        "reading": None if figures.reading is None else _reading(figures.reading),
        **_memory(figures.memory_use),
        "token_counts": figures.token_counts,
        "warnings": list(figures.warnings),
        "workload": subject.workload.parameters(),
        "warmup": subject.warmup,
        "engine": dict(subject.engine),
        "definitions": {**DEFINITIONS, **memory.DEFINITIONS},
    }


def show(subject: Subject, figures: Measurement) -> None:
    """Print the measurement for a person."""
    render.say(headline(subject))
    for caveat in subject.provenance.caveats():
        render.say(caveat)
    render.table(*tables.latency_table(figures))
    render.table(*tables.totals_table(figures))
    for table in (tables.slo_table(subject.slo, figures), tables.stall_table(figures)):
        if table is not None:
            render.table(*table)
    if (sentence := tables.reading_sentence(figures)) is not None:
        render.say(sentence)
    if figures.completed >= _ENOUGH_TO_DRAW:
        render.chart(latency_over_time(figures, subject.slo))
        render.chart(distributions(figures))
    for name, meaning in tables.definitions(subject.slo, figures).items():
        render.say(f"{name}: {meaning}")
    if figures.token_counts:
        render.say(f"token counts: {figures.token_counts}")
    for sentence in tables.failures(figures):
        render.error(sentence)
    for warning in figures.warnings:
        render.warn(warning)


def headline(subject: Subject) -> str:
    """What was done to whom."""
    work, origin = subject.workload, subject.provenance
    return (
        f"{origin.label} {subject.name} ({origin.where}): {work.describe_requests()}, {work.describe()}, "
        f"seed {work.seed}"
    )


def _latency(figures: Measurement, name: str) -> dict[str, Any]:
    """A latency with the interval of its P99."""
    interval = figures.p99_intervals.get(name)
    known = _milliseconds(getattr(figures, name))
    return {**known, "p99_ci95": None if interval is None else [limit * 1e3 for limit in interval]}


def _stall(one: RequestStall) -> dict[str, Any]:
    stall = one.stall
    return {
        "request": one.request,
        "ms": stall.seconds * 1e3,
        "at_s": stall.at,
        "tokens_before": stall.tokens_before,
    }


def _reading(reading: Reading) -> dict[str, Any]:
    return {
        "tokens_per_s": reading.tokens_per_s,
        "late_tokens": reading.late_tokens,
        "interrupted_requests": reading.interrupted,
        "waits_ms": _milliseconds(reading.waits),
    }


def _memory(use: memory.MemoryUse | None) -> dict[str, Any]:
    """Sizes in bytes."""
    return {
        "peak_kv_share": None if use is None else use.peak_kv_share,
        "kv_waste": None if use is None else use.kv_waste,
        "peak_kv_bytes": None if use is None else use.peak_kv,
        "peak_memory_bytes": None if use is None else use.peak,
        "memory": None
        if use is None
        else {
            **({} if use.parts is None else use.parts._asdict()),
            "mean_kv_share": use.mean_kv_share,
            "looks": use.looks,
            "steps": use.steps,
        },
    }


def _milliseconds(summary: Summary) -> dict[str, float | int | None]:
    times = {name: value for name, value in asdict(summary).items() if name != "count"}
    return {
        **{name: None if value is None else value * 1e3 for name, value in times.items()},
        "count": summary.count,
    }
