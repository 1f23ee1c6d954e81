"""How a measurement is shown: a table with its definitions, or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.output import tables
from llmsched.cli.bench.output.charts import distributions, latency_over_time
from llmsched.cli.figures import kv_memory
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.latency_summary import LatencySummary, ReadingPauses, RequestStall
from llmsched.cli.figures.measure import Measurement
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
        "completed": figures.requests.completed,
        "failed": figures.requests.failed,
        "failures": figures.requests.failures,
        "failure_examples": figures.requests.failure_examples,
        "valid": figures.valid,
        "interrupted": figures.run.interrupted,
        "duration_s": figures.duration,
        "input_tokens": figures.tokens.input,
        "output_tokens": figures.tokens.output,
        "output_tokens_per_s": figures.rates.output_tokens,
        "output_tokens_per_s_steady": figures.rates.output_tokens_steady,
        "requests_per_s": figures.rates.requests,
        "requests_per_s_steady": figures.rates.requests_steady,
        "steady_window_s": figures.rates.steady_window,
        "ttft_ms": _latency(figures, "ttft"),
        "itl_ms": _latency(figures, "itl"),
        "tpot_ms": _latency(figures, "tpot"),
        "e2e_ms": _latency(figures, "e2e"),
        "connect_ms": _milliseconds(figures.latency.connect),
        "worst_stall_ms": None if figures.latency.worst_stall is None else figures.latency.worst_stall * 1e3,
        "worst_stalls": [_stall(one) for one in figures.latency.stalls],
        "prefix_hit_rate": figures.tokens.prefix_hit_rate,
        "preemptions": figures.requests.preemptions,
        "asked_rate": figures.rates.asked,
        "scheduled_rate": figures.rates.scheduled,
        "achieved_rate": figures.rates.achieved,
        "client_lag_ms": _milliseconds(figures.client.send),
        "loop_lag_ms": None if figures.client.loop is None else _milliseconds(figures.client.loop),
        "machine_lag_ms": None if figures.client.machine is None else _milliseconds(figures.client.machine),
        "goodput_rps": figures.goodput.requests_per_s if figures.goodput else None,
        "attainment": figures.goodput.attainment if figures.goodput else None,
        "slo": slo,
        "slo_missed": figures.goodput.missed if figures.goodput else None,
        "slo_missed_alone": figures.goodput.missed_alone if figures.goodput else None,
        "reading": None if figures.reading is None else _reading(figures.reading),
        **_memory(figures.memory),
        "token_counts": figures.tokens.source,
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
    if figures.requests.completed >= _ENOUGH_TO_DRAW:
        render.chart(latency_over_time(figures, experiment.slo))
        render.chart(distributions(figures))
    for name, meaning in tables.definitions(experiment.slo, figures).items():
        render.say(f"{name}: {meaning}")
    if figures.tokens.source:
        render.say(f"token counts: {figures.tokens.source}")
    for sentence in tables.failures(figures):
        render.error(sentence)
    for warning in figures.warnings:
        render.warn(warning)


def _latency(figures: Measurement, name: str) -> dict[str, Any]:
    """A latency with the interval of its P99."""
    summary: LatencySummary = getattr(figures.latency, name)
    known = {key: value for key, value in _milliseconds(summary).items() if key != "p99_ci95"}
    return {**known, "p99_ci95": None if summary.p99_ci95 is None else [limit * 1e3 for limit in summary.p99_ci95]}


def _stall(one: RequestStall) -> dict[str, Any]:
    stall = one.stall
    return {
        "request": one.request,
        "ms": stall.seconds * 1e3,
        "at_s": stall.at,
        "tokens_before": stall.tokens_before,
    }


def _reading(reading: ReadingPauses) -> dict[str, Any]:
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
            "looks": use.samples,
            "steps": use.steps,
        },
    }


def _milliseconds(summary: Summary) -> dict[str, float | int | None]:
    times = {name: value for name, value in asdict(summary).items() if name not in ("count", "p99_ci95")}
    return {
        **{name: None if value is None else value * 1e3 for name, value in times.items()},
        "count": summary.count,
    }
