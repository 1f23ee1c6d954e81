"""Registry of figures: each has one entry in `FIGURES`, from which JSON, tables, CSV, ratios and definitions come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Flag, auto
from statistics import fmean
from typing import Any, Literal

from llmsched.cli.figures import kv_memory
from llmsched.cli.figures.experiment import Experiment, MeasuredRun
from llmsched.cli.figures.measure import Measurement
from llmsched.engine.goodput import Goodput, Slo
from llmsched.engine.percentiles import PERCENTILES, Summary
from llmsched.engine.request_latency import DEFINITIONS
from llmsched.engine.units import human_bytes, human_seconds

_DRAFTS = {
    "tokens per draft": "mean number of output tokens that a step with a draft (speculative decoding) gave a request: "
    "the accepted draft tokens and one more"
}

#: Function that returns the value of a figure; None if the run has no such value.
Getter = Callable[[Experiment, Measurement], Any]

#: Unit of a figure. "ms": `Figure.get` returns seconds and JSON has milliseconds. "": JSON has the value as it is.
Unit = Literal["", "count", "s", "ms", "/s", "share", "bytes"]


class Place(Flag):
    #: `bench --json`.
    JSON = auto()
    #: TOTALS and LATENCIES are tables. OWN_TABLE is a separate table or sentence (see bench/report/run_report.py).
    TOTALS = auto()
    LATENCIES = auto()
    OWN_TABLE = auto()
    #: CSV is a column of --csv. CSV_OBJECT is one of the last columns of --csv, whose cells hold JSON.
    CSV = auto()
    CSV_OBJECT = auto()
    #: RATIOS is a row of --compare. ROUND is the JSON of one round of --compare.
    RATIOS = auto()
    ROUND = auto()
    #: JSON of a rate tried by --find-knee.
    ATTEMPT = auto()


@dataclass(frozen=True, slots=True)
class Figure:
    name: str  # JSON key
    unit: Unit
    get: Getter
    shown_in: Place
    label: str = ""  # name in tables
    definition: Mapping[str, str] = field(default_factory=dict)  # terms, with sentences that explain them
    csv_keys: tuple[str, ...] = ()  # entries of a JSON object that CSV shows
    ratio_keys: tuple[str, ...] = ()  # entries of a JSON object that --compare shows

    def json(self, run: MeasuredRun) -> Any:
        """Return the value for JSON, in milliseconds if the unit is "ms"."""
        value = self.get(*run)
        if isinstance(value, Summary):
            return summary_json(value)
        return value * 1e3 if self.unit == "ms" and value is not None else value

    def row(self, run: MeasuredRun) -> list[str] | None:
        """Return label and value for the table of totals; None if the figure has neither a value nor a unit."""
        value = self.get(*run)
        return None if value is None and not self.unit else [self.label, format_value(value, self.unit)]


def format_value(value: float | None, unit: Unit) -> str:
    if value is None:
        return "n/a"
    if unit == "ms":
        return human_seconds(value)
    if unit == "bytes":
        return human_bytes(value)
    return {"s": "{:.2f} s", "/s": "{:.2f}", "share": "{:.1%}"}.get(unit, "{}").format(value)


def summary_json(summary: Summary) -> dict[str, Any]:
    """Return a summary of times in seconds as JSON in milliseconds."""

    def scaled(value: Any) -> Any:
        return [limit * 1e3 for limit in value] if isinstance(value, tuple) else None if value is None else value * 1e3

    values = asdict(summary)
    count = values.pop("count")
    return {**{name: scaled(value) for name, value in values.items()}, "count": count}


def _slo_json(slo: Slo) -> dict[str, Any]:
    limits: dict[str, Any] = {f"{name}_ms": limit * 1e3 for name, limit in slo.given().items()}
    return {**limits, "itl_statistic": slo.itl_statistic} if "itl_ms" in limits else limits


def _stalls_json(_: Experiment, figures: Measurement) -> list[dict[str, Any]]:
    return [
        {"request": request, "ms": seconds * 1e3, "at_s": at, "tokens_before": tokens_before}
        for request, (seconds, at, tokens_before) in figures.latency.stalls
    ]


def _reading_json(_: Experiment, figures: Measurement) -> dict[str, Any] | None:
    if (reading := figures.reading) is None:
        return None
    return {
        "tokens_per_s": reading.tokens_per_s,
        "late_tokens": reading.late_tokens,
        "interrupted_requests": reading.interrupted,
        "waits_ms": summary_json(reading.waits),
    }


def _memory_json(used: kv_memory.MemoryUsage) -> dict[str, Any]:
    parts = {} if used.parts is None else used.parts._asdict()
    return {
        **parts,
        "mean_kv_share": used.mean_kv_share,
        "looks": used.samples,
        "steps": used.steps,
        "kv_tokens": used.kv_tokens,
    }


def _scheduler_json(figures: Measurement) -> dict[str, Any] | None:
    """Return the mean and the maximum of running and of waiting requests, over the samples of the target's state."""
    if not figures.samples:
        return None
    return {
        name: {"mean": fmean(numbers), "max": max(numbers)}
        for name in ("running", "waiting")
        for numbers in ([getattr(sample, name) for sample in figures.samples],)
    }


def _sent_text(_: Experiment, figures: Measurement) -> str:
    rates = figures.rates
    wanted = [
        *([] if rates.scheduled is None else [f"scheduled {rates.scheduled:.2f}"]),
        *([] if rates.asked is None else [f"requested {rates.asked:g}"]),
    ]
    return format_value(rates.achieved, "/s") + (f" ({', '.join(wanted)})" if wanted else "")


def _peak_kv_text(_: Experiment, figures: Measurement) -> str | None:
    if (used := figures.memory) is None:
        return None
    if used.parts is None or used.peak_kv is None:
        return f"{used.peak_kv_share:.1%} of KV memory"
    return f"{human_bytes(used.peak_kv)}, {used.peak_kv_share:.1%} of {human_bytes(used.parts.kv)}"


def _peak_memory_text(_: Experiment, figures: Measurement) -> str | None:
    return human_bytes(figures.memory.peak) if figures.memory and figures.memory.peak else None


def _drafts_text(_: Experiment, figures: Measurement) -> str | None:
    counts = figures.run.counts
    if not counts.drafts or counts.acceptance is None:
        return None
    return f"{counts.acceptance:.1%} of {counts.drafts['draft_tokens']}, {counts.tokens_per_draft:.2f} tokens per draft"


def _replicas_text(_: Experiment, figures: Measurement) -> str | None:
    counts = figures.run.counts.replicas or {}
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or None


def _define(*terms: str) -> dict[str, str]:
    return {term: {**DEFINITIONS, **kv_memory.DEFINITIONS}[term] for term in terms}


_JSON, _RATIOS, _ROUND, _ATTEMPT = Place.JSON, Place.RATIOS, Place.ROUND, Place.ATTEMPT
_CSV = Place.JSON | Place.CSV
_TOTALS = _CSV | Place.TOTALS
_OWN_TABLE = _CSV | Place.OWN_TABLE
_MAIN, _GOODPUT = _TOTALS | _RATIOS | _ATTEMPT, _OWN_TABLE | _ATTEMPT
_STATISTICS = ("mean", *PERCENTILES, "max", "count")
_SLOS = ("ttft", "itl", "tpot", "e2e")
_LOAD_KEYS = ("load", "seed", "fingerprint")
_ATTAINMENT_KEYS = (*_SLOS, "all")
_SLO_KEYS = (*(f"{name}_ms" for name in _SLOS), "itl_statistic")


def _row(label: str, text: Callable[[Experiment, Measurement], str | None], *terms: str) -> Figure:
    """Return a figure that only the table of totals shows. The table omits the row if `text` returns None."""
    return Figure(label, "", text, Place.TOTALS, label, _define(*terms))


def _latency(label: str, get: Callable[[Experiment, Measurement], Summary], shown_in: Place, *terms: str) -> Figure:
    shown_in |= _CSV | Place.LATENCIES | _RATIOS | _ATTEMPT
    name, definition = f"{label.lower()}_ms", _define(label, *terms)
    return Figure(name, "ms", get, shown_in, label, definition, csv_keys=_STATISTICS, ratio_keys=PERCENTILES)


def _goodput(
    name: str, unit: Unit, get: Callable[[Goodput], Any], shown_in: Place, label: str = "", *terms: str, **more: Any
) -> Figure:
    return Figure(name, unit, lambda e, m: (good := m.goodput) and get(good), shown_in, label, _define(*terms), **more)


def _memory(
    name: str, unit: Unit, get: Callable[[kv_memory.MemoryUsage], Any], shown_in: Place, label: str = ""
) -> Figure:
    definition = _define(label) if label else {}
    return Figure(name, unit, lambda e, m: (used := m.memory) and get(used), shown_in, label, definition)


#: Every figure, in the order of tables and CSV columns. Keep the order: rows are appended to existing CSV files.
FIGURES: tuple[Figure, ...] = (
    Figure("measured", "", lambda e, m: e.provenance.measured, _CSV),
    Figure("calibration_error", "share", lambda e, m: e.provenance.calibration_error, _CSV),
    Figure("published_error", "share", lambda e, m: e.provenance.published_error, _CSV),
    Figure("refused_by_serve", "", lambda e, m: e.provenance.refused_by_serve, _JSON),
    Figure("target", "", lambda e, m: e.name, _CSV),
    Figure("where", "", lambda e, m: e.provenance.where, _CSV),
    Figure("failures", "", lambda e, m: m.requests.failures, _JSON | Place.CSV_OBJECT),
    Figure("failure_examples", "", lambda e, m: m.requests.failure_examples, _JSON),
    Figure("workload", "", lambda e, m: e.workload.parameters(), _CSV | Place.CSV_OBJECT, csv_keys=_LOAD_KEYS),
    Figure("asked_rate", "/s", lambda e, m: m.rates.asked, _CSV),
    Figure("scheduled_rate", "/s", lambda e, m: m.rates.scheduled, _CSV),
    Figure("achieved_rate", "/s", lambda e, m: m.rates.achieved, _CSV | _ATTEMPT),
    _row("completed / failed", lambda e, m: f"{m.requests.completed} / {m.requests.failed}"),
    Figure("completed", "count", lambda e, m: m.requests.completed, _CSV | _ROUND | _ATTEMPT),
    Figure("failed", "count", lambda e, m: m.requests.failed, _CSV | _ROUND | _ATTEMPT),
    Figure("valid", "", lambda e, m: m.valid, _CSV | _ROUND | _ATTEMPT),
    Figure("interrupted", "", lambda e, m: m.run.interrupted, _CSV),
    _row("tokens in / out", lambda e, m: f"{format_value(m.tokens.input, 'count')} / {m.tokens.output}"),
    Figure("duration_s", "s", lambda e, m: m.duration, _TOTALS | _ROUND | _ATTEMPT, "duration"),
    Figure("input_tokens", "count", lambda e, m: m.tokens.input, _CSV),
    Figure("output_tokens", "count", lambda e, m: m.tokens.output, _CSV),
    Figure("output_tokens_per_s", "/s", lambda e, m: m.rates.output_tokens, _MAIN | _ROUND, "output tokens/s"),
    Figure(
        "output_tokens_per_s_steady",
        "/s",
        lambda e, m: m.rates.output_tokens_steady,
        _TOTALS | _ROUND,
        "  steady-state",
        _define("steady"),
    ),
    Figure("output_tokens_per_s_ci95", "", lambda e, m: m.rates.output_tokens_ci95, _JSON),
    Figure("requests_per_s", "/s", lambda e, m: m.rates.requests, _MAIN, "requests/s"),
    Figure("requests_per_s_steady", "/s", lambda e, m: m.rates.requests_steady, _TOTALS, "  steady-state"),
    Figure("steady_window_s", "", lambda e, m: m.rates.steady_window, _JSON),
    _row("sent requests/s", _sent_text),
    _latency("TTFT", lambda e, m: m.latency.ttft, _ROUND),
    _latency("ITL", lambda e, m: m.latency.itl, _ROUND),
    _latency("TPOT", lambda e, m: m.latency.tpot, _JSON),
    _latency("E2E", lambda e, m: m.latency.e2e, _ROUND, "percentiles", "P99 interval"),
    Figure("connect_ms", "ms", lambda e, m: m.latency.connect, _CSV, csv_keys=_STATISTICS),
    Figure("client_lag_ms", "ms", lambda e, m: m.client.send, _CSV, csv_keys=_STATISTICS),
    Figure("loop_lag_ms", "ms", lambda e, m: m.client.loop, _JSON),
    Figure("machine_lag_ms", "ms", lambda e, m: m.client.machine, _JSON),
    Figure("worst_stall_ms", "ms", lambda e, m: m.latency.worst_stall, _CSV | _RATIOS, "worst stall"),
    Figure("worst_stalls", "", _stalls_json, _JSON),
    _memory("steps", "count", lambda used: used.steps, _RATIOS, "steps"),
    _memory("kv_waste", "share", lambda used: used.kv_waste, _JSON | _RATIOS, "KV waste"),
    _memory("peak_kv_share", "share", lambda used: used.peak_kv_share, _JSON),
    _memory("peak_kv_bytes", "bytes", lambda used: used.peak_kv, _JSON | _RATIOS, "peak KV"),
    _memory("peak_memory_bytes", "bytes", lambda used: used.peak, _JSON | _RATIOS, "peak memory"),
    _memory("memory", "", _memory_json, _JSON),
    Figure("prefix_hit_rate", "share", lambda e, m: m.tokens.prefix_hit_rate, _TOTALS | _ATTEMPT, "prefix hit rate"),
    Figure("preemptions", "count", lambda e, m: m.requests.preemptions, _MAIN, "preemptions"),
    Figure("draft_acceptance", "share", lambda e, m: m.run.counts.acceptance, _JSON | _ROUND),
    Figure("tokens_per_draft", "", lambda e, m: m.run.counts.tokens_per_draft, _JSON | _ROUND),
    Figure("draft tokens accepted", "", _drafts_text, Place.TOTALS, "draft tokens accepted", _DRAFTS),
    Figure("engine_counts", "", lambda e, m: m.run.counts.as_json(), _JSON),
    Figure("scheduler", "", lambda e, m: _scheduler_json(m), _JSON),
    Figure("request_tokens_p99", "count", lambda e, m: m.tokens.request_p99, _JSON),
    _row("worst stall", lambda e, m: format_value(m.latency.worst_stall, "ms"), "stall"),
    _row("client lag P99", lambda e, m: format_value(m.client.send.p99, "ms")),
    _row("peak KV", _peak_kv_text, "peak KV"),
    _row("peak memory", _peak_memory_text, "peak memory"),
    _row("requests by replica", _replicas_text),
    _goodput(
        "goodput_rps", "/s", lambda good: good.requests_per_s, _GOODPUT | _RATIOS, "goodput, requests/s", "goodput"
    ),
    _goodput("attainment", "", lambda good: good.attainment, _GOODPUT, "", "SLO of ITL", csv_keys=_ATTAINMENT_KEYS),
    Figure("slo", "", lambda e, m: _slo_json(e.slo), _CSV, csv_keys=_SLO_KEYS),
    _goodput("slo_missed", "", lambda good: good.missed, _JSON),
    _goodput("slo_missed_alone", "", lambda good: good.missed_alone, _JSON),
    Figure("reading", "", _reading_json, _OWN_TABLE, "", _define("reading"), ("late_tokens", "interrupted_requests")),
    Figure("token_counts", "", lambda e, m: m.tokens.source, _CSV),
    Figure("warnings", "", lambda e, m: list(m.warnings), _JSON),
    Figure("warmup", "count", lambda e, m: e.warmup, _JSON),
    Figure("engine", "", lambda e, m: dict(e.engine), _JSON | Place.CSV_OBJECT),
)


def figures_in(places: Place) -> list[Figure]:
    """Return the figures that are shown in at least one of these places."""
    return [figure for figure in FIGURES if figure.shown_in & places]


def paths_in(place: Literal[Place.CSV, Place.RATIOS]) -> list[tuple[Figure, tuple[str, ...]]]:
    """Return each figure shown in `place` with the path of its value in the JSON report.

    A figure that shows several values there occurs once for each.
    """
    found: list[tuple[Figure, tuple[str, ...]]] = []
    for figure in figures_in(place):
        keys = figure.csv_keys if place is Place.CSV else figure.ratio_keys
        found += [(figure, (figure.name, key)) for key in keys] if keys else [(figure, (figure.name,))]
    return found


def look_up(report: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = report
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def as_json(experiment: Experiment, figures: Measurement) -> dict[str, Any]:
    """Return the JSON report of a run. Unknown figures are null."""
    run = MeasuredRun(experiment, figures)
    report = {figure.name: figure.json(run) for figure in figures_in(Place.JSON)}
    return {**report, "definitions": {**DEFINITIONS, **definitions_in(Place.JSON)}}


def definitions_in(places: Place, run: MeasuredRun | None = None) -> dict[str, str]:
    """Return the definitions of the figures shown in these places. With `run`, skip figures that the run lacks."""
    found: dict[str, str] = {}
    for figure in figures_in(places):
        if run is None or figure.get(*run) is not None:
            found.update(figure.definition)
    return found
