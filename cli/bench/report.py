"""How a measurement is shown: a table with its definitions, or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.load import Load
from llmsched.cli.bench.measure import Measurement, Reading, RequestStall
from llmsched.engine.latency import DEFINITIONS, Slo, Summary


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured: its name, where it ran ("in process", a URL, or a simulated device), and the settings used.

    Of what was simulated `calibration_error` is the relative error of the fitted cost of a step, `published_error` the
    median one of a roofline's TPOT against published measurements; None where it is not known.
    """

    name: str
    where: str
    workload: Load
    slo: Slo
    warmup: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = True
    calibration_error: float | None = None
    published_error: float | None = None

    @property
    def kind(self) -> str:
        """The word that every report begins with."""
        return "MEASURED" if self.measured else "SIMULATED"


def as_json(subject: Subject, figures: Measurement) -> dict[str, Any]:
    """The measurement for scripts. Times are in milliseconds, rates per second; null is what the run cannot tell."""
    slo: dict[str, Any] = {f"{name}_ms": limit * 1e3 for name, limit in subject.slo.given().items()}
    if "itl_ms" in slo:
        slo["itl_statistic"] = subject.slo.itl_statistic
    return {
        "measured": subject.measured,
        "calibration_error": subject.calibration_error,
        "published_error": subject.published_error,
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
        "achieved_rate": figures.achieved_rate,
        "client_lag_ms": _milliseconds(figures.client_lag),
        "loop_lag_ms": None if figures.loop_lag is None else _milliseconds(figures.loop_lag),
        "goodput_rps": figures.goodput.requests_per_s if figures.goodput else None,
        "attainment": figures.goodput.attainment if figures.goodput else None,
        "slo": slo,
        "slo_missed": figures.goodput.missed if figures.goodput else None,
        "slo_missed_alone": figures.goodput.missed_alone if figures.goodput else None,
        "reading": None if figures.reading is None else _reading(figures.reading),
        "token_counts": figures.token_counts,
        "warnings": list(figures.warnings),
        "workload": subject.workload.parameters(),
        "warmup": subject.warmup,
        "engine": dict(subject.engine),
        "definitions": dict(DEFINITIONS),
    }


def show(subject: Subject, figures: Measurement) -> None:
    """Print the measurement for a person."""
    work = subject.workload
    render.say(
        f"{subject.kind} {subject.name} ({subject.where}): {work.describe_requests()}, {work.describe()}, "
        f"seed {work.seed}"
    )
    if not subject.measured:
        render.say(_how_sure(subject))
    rows = [_latency_row(figures, name) for name in ("ttft", "itl", "tpot", "e2e")]
    columns = ["", "mean", "P50", "P95", "P99", "P99 (95 % sure)", "max", "samples"]
    render.table("latency in ms", columns, rows)
    render.table("", ["", ""], _total_rows(figures))
    if figures.goodput:
        _show_goodput(subject.slo, figures)
    _show_pauses(figures)
    for name in _defined(subject.slo, figures):
        render.say(f"{name}: {DEFINITIONS[name]}")
    if figures.token_counts:
        render.say(f"token counts: {figures.token_counts}")
    total = figures.completed + figures.failed
    for reason, count in figures.failures.items():
        detail = figures.failure_examples[reason]
        render.error(f"{count} of {total} requests failed: {reason}{f' ({detail})' if detail else ''}")
    for warning in figures.warnings:
        render.warn(warning)


def _how_sure(subject: Subject) -> str:
    """How far the times of simulated steps are to be trusted."""
    if subject.calibration_error is not None:
        return f"step times: fitted to this device, {subject.calibration_error:.1%} off where not fitted to (median)"
    if subject.published_error is not None:
        return f"step times: a roofline, {subject.published_error:.0%} off published TPOT in the median"
    return "step times: a roofline that no measurement of such a GPU has been held against"


def _total_rows(figures: Measurement) -> list[list[str]]:
    asked = "" if figures.asked_rate is None else f" (asked {figures.asked_rate:g})"
    return [
        ["completed / failed", f"{figures.completed} / {figures.failed}"],
        ["duration", f"{figures.duration:.2f} s"],
        ["output tokens/s", _rate(figures.output_tokens_per_s)],
        ["  without ramp and drain", _rate(figures.output_tokens_per_s_steady)],
        ["requests/s", _rate(figures.requests_per_s)],
        ["  without ramp and drain", _rate(figures.requests_per_s_steady)],
        ["sent requests/s", _rate(figures.achieved_rate) + asked],
        ["prefix hit rate", "n/a" if figures.prefix_hit_rate is None else f"{figures.prefix_hit_rate:.1%}"],
        ["preemptions", "n/a" if figures.preemptions is None else str(figures.preemptions)],
        ["worst stall", "n/a" if figures.worst_stall is None else render.human_seconds(figures.worst_stall)],
        ["client lag P99", "n/a" if figures.client_lag.p99 is None else render.human_seconds(figures.client_lag.p99)],
    ]


def _show_goodput(slo: Slo, figures: Measurement) -> None:
    assert figures.goodput is not None
    good = figures.goodput
    rows = [
        [
            f"{name.upper()} {slo.itl_statistic}" if name == "itl" else name.upper(),
            f"{limit * 1e3:g} ms",
            f"{good.attainment[name]:.1%}",
            str(good.missed[name]),
            str(good.missed_alone[name]),
        ]
        for name, limit in slo.given().items()
    ]
    missed = figures.completed - round(good.attainment["all"] * (figures.completed + figures.failed))
    rows.append(["all", "", f"{good.attainment['all']:.1%}", str(missed), ""])
    render.say(f"goodput {good.requests_per_s:.3g} requests/s")
    render.table("", ["SLO", "limit", "met by", "requests that missed it", "and no other"], rows)


def _show_pauses(figures: Measurement) -> None:
    """The worst stalls, and what a reader would have noticed."""
    if figures.stalls:
        rows = [
            [
                str(one.request),
                render.human_seconds(one.stall.seconds),
                f"{one.stall.at:.2f}",
                str(one.stall.tokens_before),
            ]
            for one in figures.stalls
        ]
        render.table("worst stalls", ["request", "length", "after s of the run", "after its token"], rows)
    if (reading := figures.reading) is not None:
        longest = "" if reading.waits.max is None else f", at worst for {render.human_seconds(reading.waits.max)}"
        render.say(
            f"a reader at {reading.tokens_per_s:g} tokens/s would have waited in {reading.interrupted:.1%} of requests "
            f"for {reading.late_tokens:.1%} of tokens{longest}"
        )


def _defined(slo: Slo, figures: Measurement) -> list[str]:
    """The definitions that belong under the tables."""
    names = ["TTFT", "ITL", "TPOT", "E2E", "percentiles"]
    names += ["P99 interval"] if any(figures.p99_intervals.values()) else []
    names += ["steady"] if figures.output_tokens_per_s_steady is not None else []
    names += ["goodput"] if figures.goodput else []
    names += ["SLO of ITL"] if slo.itl is not None else []
    names += ["stall"] if figures.stalls else []
    return names + (["reading"] if figures.reading else [])


def _latency_row(figures: Measurement, name: str) -> list[str]:
    summary: Summary = getattr(figures, name)
    interval = figures.p99_intervals.get(name)
    known = [_ms(value) for value in (summary.mean, summary.p50, summary.p95, summary.p99)]
    between = "n/a" if interval is None else f"{_ms(interval[0])} to {_ms(interval[1])}"
    return [name.upper(), *known, between, _ms(summary.max), str(summary.count)]


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e3:.1f}"


def _rate(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


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


def _milliseconds(summary: Summary) -> dict[str, float | int | None]:
    times = {name: value for name, value in asdict(summary).items() if name != "count"}
    return {
        **{name: None if value is None else value * 1e3 for name, value in times.items()},
        "count": summary.count,
    }
