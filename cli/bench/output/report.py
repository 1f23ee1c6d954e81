"""How a measurement is shown: a table with its definitions, or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.output import tables
from llmsched.cli.bench.output.charts import distributions, latency_over_time
from llmsched.cli.figures import kv_memory
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import Measurement, Reading, RequestStall
from llmsched.engine.latency import DEFINITIONS, Summary

#: Requests from which on a chart shows more than the table does.
_ENOUGH_TO_DRAW = 10


def as_json(experiment: Experiment, figures: Measurement) -> dict[str, Any]:
    """The measurement for scripts. Times are in milliseconds, rates per second; null is what the run cannot tell."""
    slo: dict[str, Any] = {f"{name}_ms": limit * 1e3 for name, limit in experiment.slo.given().items()}
    if "itl_ms" in slo:
        slo["itl_statistic"] = experiment.slo.itl_statistic
    return {
        **experiment.provenance.as_json(),
        "target": experiment.name,
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
        **_memory(figures.memory_usage),
        "token_counts": figures.token_counts,
        "warnings": list(figures.warnings),
        "workload": experiment.workload.parameters(),
        "warmup": experiment.warmup,
        "engine": dict(experiment.engine),
        "definitions": {**DEFINITIONS, **kv_memory.DEFINITIONS},
    }


def show(experiment: Experiment, figures: Measurement) -> None:
    """Print the measurement for a person."""
    render.say(experiment.headline())
    for caveat in experiment.provenance.caveats():
        render.say(caveat)
    render.table(*tables.latency_table(figures))
    render.table(*tables.totals_table(figures))
    for table in (tables.slo_table(experiment.slo, figures), tables.stall_table(figures)):
        if table is not None:
            render.table(*table)
    if (sentence := tables.reading_sentence(figures)) is not None:
        render.say(sentence)
    if figures.completed >= _ENOUGH_TO_DRAW:
        render.chart(latency_over_time(figures, experiment.slo))
        render.chart(distributions(figures))
    for name, meaning in tables.definitions(experiment.slo, figures).items():
        render.say(f"{name}: {meaning}")
    if figures.token_counts:
        render.say(f"token counts: {figures.token_counts}")
    for sentence in tables.failures(figures):
        render.error(sentence)
    for warning in figures.warnings:
        render.warn(warning)


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


def _memory(use: kv_memory.MemoryUsage | None) -> dict[str, Any]:
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
