"""Registry of figures: each has one entry, from which JSON, tables, CSV, ratios and definitions are made.

To add a figure, add its entry to `FIGURES` and test its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from llmsched.cli.figures import kv_memory
from llmsched.cli.figures.experiment import Experiment, MeasuredRun
from llmsched.cli.figures.latency_summary import ReadingPauses, RequestStall
from llmsched.cli.figures.measure import Measurement
from llmsched.engine.latency import DEFINITIONS, Goodput, Slo, Summary
from llmsched.engine.units import human_bytes, human_seconds

#: Unit of a figure. "ms": `Figure.get` returns seconds and JSON has milliseconds. "": JSON has the value as it is.
Unit = Literal["", "count", "s", "ms", "/s", "share", "bytes"]

#: json: `bench --json`. totals, latencies: rows of a run's tables; own table: a table or sentence of its own, written
#: in bench/report. csv: columns of --csv; csv object: a column of JSON after all others. ratios: rows of --compare.
#: comparison, round, attempt: JSON of a compared variant, of one of its rounds, and of a rate tried by --find-knee.
Place = Literal[
    "json", "totals", "latencies", "own table", "csv", "csv object", "ratios", "comparison", "round", "attempt"
]

#: Places where a figure is shown, each with the keys of its JSON value to show there; (): the whole value.
ShownIn = Mapping[Place, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run. `name` is its JSON key, `label` its name in tables.

    `get` returns its value, None if the run cannot tell. `text` formats it for the table of totals (None: no row);
    without `text` the unit decides. `definition` has a sentence for each term that is printed with the figure.
    """

    name: str
    unit: Unit
    get: Callable[[MeasuredRun], Any]
    shown_in: ShownIn
    label: str = ""
    definition: Mapping[str, str] = field(default_factory=dict)
    text: Callable[[MeasuredRun], str | None] | None = None

    def json(self, run: MeasuredRun) -> Any:
        """Return the value for JSON."""
        value = self.get(run)
        if isinstance(value, Summary):
            return summary_json(value)
        return value * 1e3 if self.unit == "ms" and value is not None else value

    def row(self, run: MeasuredRun) -> list[str] | None:
        """Return label and value for the table of totals; None if the run has no such row."""
        text = format_value(self.get(run), self.unit) if self.text is None else self.text(run)
        return None if text is None else [self.label, text]


def format_value(value: float | None, unit: Unit) -> str:
    """Return a value of `Figure.get` with its unit."""
    if value is None:
        return "n/a"
    match unit:
        case "s":
            return f"{value:.2f} s"
        case "ms":
            return human_seconds(value)
        case "/s":
            return f"{value:.2f}"
        case "share":
            return f"{value:.1%}"
        case "bytes":
            return human_bytes(value)
        case _:
            return str(value)


def summary_json(summary: Summary) -> dict[str, Any]:
    """Return a distribution of seconds in milliseconds."""

    def scaled(value: Any) -> Any:
        return [limit * 1e3 for limit in value] if isinstance(value, tuple) else None if value is None else value * 1e3

    values = asdict(summary)
    count = values.pop("count")
    return {**{name: scaled(value) for name, value in values.items()}, "count": count}


def _slo_json(slo: Slo) -> dict[str, Any]:
    limits: dict[str, Any] = {f"{name}_ms": limit * 1e3 for name, limit in slo.given().items()}
    return {**limits, "itl_statistic": slo.itl_statistic} if "itl_ms" in limits else limits


def _stall_json(one: RequestStall) -> dict[str, Any]:
    stall = one.stall
    return {
        "request": one.request,
        "ms": stall.seconds * 1e3,
        "at_s": stall.at,
        "tokens_before": stall.tokens_before,
    }


def _reading_json(reading: ReadingPauses | None) -> dict[str, Any] | None:
    if reading is None:
        return None
    return {
        "tokens_per_s": reading.tokens_per_s,
        "late_tokens": reading.late_tokens,
        "interrupted_requests": reading.interrupted,
        "waits_ms": summary_json(reading.waits),
    }


def _memory_json(run: MeasuredRun) -> dict[str, Any] | None:
    """Return the parts of the target's memory in bytes, and how its usage was seen."""
    if (used := run.figures.memory) is None:
        return None
    parts = {} if used.parts is None else used.parts._asdict()
    return {**parts, "mean_kv_share": used.mean_kv_share, "looks": used.samples, "steps": used.steps}


def _sent_text(run: MeasuredRun) -> str:
    """Return the rate at which requests were sent, with the rates of the schedule and of the flags."""
    rates = run.figures.rates
    wanted = [
        *([] if rates.scheduled is None else [f"scheduled {rates.scheduled:.2f}"]),
        *([] if rates.asked is None else [f"requested {rates.asked:g}"]),
    ]
    return format_value(rates.achieved, "/s") + (f" ({', '.join(wanted)})" if wanted else "")


def _peak_kv_text(run: MeasuredRun) -> str | None:
    if (used := run.figures.memory) is None:
        return None
    if used.parts is None or used.peak_kv is None:
        return f"{used.peak_kv_share:.1%} of KV memory"
    return f"{human_bytes(used.peak_kv)}, {used.peak_kv_share:.1%} of {human_bytes(used.parts.kv)}"


def _define(*terms: str) -> dict[str, str]:
    return {term: {**DEFINITIONS, **kv_memory.DEFINITIONS}[term] for term in terms}


_JSON: ShownIn = {"json": ()}
_CSV: ShownIn = {"json": (), "csv": ()}
_TOTALS: ShownIn = {**_CSV, "totals": ()}
_STATISTICS = ("mean", "p50", "p95", "p99", "max", "count")
_SUMMARY: ShownIn = {"json": (), "csv": _STATISTICS}
_LATENCY: ShownIn = {**_SUMMARY, "latencies": (), "ratios": ("p50", "p95", "p99"), "attempt": ()}
_SLOS = ("ttft", "itl", "tpot", "e2e")


def _latency(label: str, get: Callable[[MeasuredRun], Summary], shown_in: ShownIn, *terms: str) -> Figure:
    return Figure(f"{label.lower()}_ms", "ms", get, {**_LATENCY, **shown_in}, label, _define(label, *terms))


def _of_goodput(get: Callable[[Goodput], Any]) -> Callable[[MeasuredRun], Any]:
    """Return a getter that gives None if the run has no goodput."""
    return lambda r: None if r.figures.goodput is None else get(r.figures.goodput)


def _of_memory(get: Callable[[kv_memory.MemoryUsage], Any]) -> Callable[[MeasuredRun], Any]:
    """Return a getter that gives None if the target does not report its memory."""
    return lambda r: None if (used := r.figures.memory) is None else get(used)


#: Every figure, in the order of CSV columns, which must not change: rows are appended to files of earlier versions.
FIGURES: tuple[Figure, ...] = (
    Figure("measured", "", lambda r: r.experiment.provenance.measured, _CSV),
    Figure("calibration_error", "share", lambda r: r.experiment.provenance.calibration_error, _CSV),
    Figure("published_error", "share", lambda r: r.experiment.provenance.published_error, _CSV),
    Figure("refused_by_serve", "", lambda r: r.experiment.provenance.refused_by_serve, _JSON),
    Figure("target", "", lambda r: r.experiment.name, _CSV),
    Figure("where", "", lambda r: r.experiment.provenance.where, _CSV),
    Figure("failures", "", lambda r: r.figures.requests.failures, {"json": (), "csv object": ()}),
    Figure("failure_examples", "", lambda r: r.figures.requests.failure_examples, _JSON),
    Figure(
        "workload",
        "",
        lambda r: r.experiment.workload.parameters(),
        {"json": (), "csv": ("load", "seed", "fingerprint"), "csv object": ()},
    ),
    Figure("asked_rate", "/s", lambda r: r.figures.rates.asked, _CSV),
    Figure("scheduled_rate", "/s", lambda r: r.figures.rates.scheduled, _CSV),
    Figure("achieved_rate", "/s", lambda r: r.figures.rates.achieved, {**_CSV, "attempt": ()}),
    Figure(
        "completed",
        "count",
        lambda r: r.figures.requests.completed,
        {**_TOTALS, "round": (), "attempt": ()},
        label="completed / failed",
        text=lambda r: f"{r.figures.requests.completed} / {r.figures.requests.failed}",
    ),
    Figure("failed", "count", lambda r: r.figures.requests.failed, {**_CSV, "round": (), "attempt": ()}),
    Figure("valid", "", lambda r: r.figures.valid, {**_CSV, "round": (), "attempt": ()}),
    Figure("interrupted", "", lambda r: r.figures.run.interrupted, _CSV),
    Figure("duration_s", "s", lambda r: r.figures.duration, {**_TOTALS, "round": (), "attempt": ()}, label="duration"),
    Figure(
        "input_tokens",
        "count",
        lambda r: r.figures.tokens.input,
        _TOTALS,
        label="tokens in / out",
        text=lambda r: f"{format_value(r.figures.tokens.input, 'count')} / {r.figures.tokens.output}",
    ),
    Figure("output_tokens", "count", lambda r: r.figures.tokens.output, _CSV),
    Figure(
        "output_tokens_per_s",
        "/s",
        lambda r: r.figures.rates.output_tokens,
        {**_TOTALS, "ratios": (), "round": (), "attempt": ()},
        label="output tokens/s",
    ),
    Figure(
        "output_tokens_per_s_steady",
        "/s",
        lambda r: r.figures.rates.output_tokens_steady,
        {**_TOTALS, "round": ()},
        label="  steady-state",
        definition=_define("steady"),
    ),
    Figure(
        "requests_per_s",
        "/s",
        lambda r: r.figures.rates.requests,
        {**_TOTALS, "ratios": (), "attempt": ()},
        label="requests/s",
    ),
    Figure("requests_per_s_steady", "/s", lambda r: r.figures.rates.requests_steady, _TOTALS, label="  steady-state"),
    Figure("steady_window_s", "", lambda r: r.figures.rates.steady_window, _JSON),
    Figure("sent", "/s", lambda r: r.figures.rates.achieved, {"totals": ()}, label="sent requests/s", text=_sent_text),
    _latency("TTFT", lambda r: r.figures.latency.ttft, {"round": ()}),
    _latency("ITL", lambda r: r.figures.latency.itl, {"round": ()}),
    _latency("TPOT", lambda r: r.figures.latency.tpot, {}),
    _latency("E2E", lambda r: r.figures.latency.e2e, {"round": ()}, "percentiles", "P99 interval"),
    Figure("connect_ms", "ms", lambda r: r.figures.latency.connect, _SUMMARY),
    Figure(
        "client_lag_ms",
        "ms",
        lambda r: r.figures.client.send,
        {**_SUMMARY, "totals": ()},
        label="client lag P99",
        text=lambda r: format_value(r.figures.client.send.p99, "ms"),
    ),
    Figure("loop_lag_ms", "ms", lambda r: r.figures.client.loop, _JSON),
    Figure("machine_lag_ms", "ms", lambda r: r.figures.client.machine, _JSON),
    Figure(
        "worst_stall_ms",
        "ms",
        lambda r: r.figures.latency.worst_stall,
        {**_TOTALS, "ratios": ()},
        label="worst stall",
        definition=_define("stall"),
    ),
    Figure("worst_stalls", "", lambda r: [_stall_json(one) for one in r.figures.latency.stalls], _JSON),
    Figure(
        "prefix_hit_rate",
        "share",
        lambda r: r.figures.tokens.prefix_hit_rate,
        {**_TOTALS, "attempt": ()},
        label="prefix hit rate",
    ),
    Figure(
        "preemptions",
        "count",
        lambda r: r.figures.requests.preemptions,
        {**_TOTALS, "ratios": (), "attempt": ()},
        label="preemptions",
    ),
    Figure(
        "goodput_rps",
        "/s",
        _of_goodput(lambda good: good.requests_per_s),
        {**_CSV, "own table": (), "ratios": (), "attempt": ()},
        label="goodput, requests/s",
        definition=_define("goodput"),
    ),
    Figure(
        "attainment",
        "",
        _of_goodput(lambda good: good.attainment),
        {"json": (), "own table": (), "csv": (*_SLOS, "all"), "attempt": ()},
        definition=_define("SLO of ITL"),
    ),
    Figure(
        "slo",
        "",
        lambda r: _slo_json(r.experiment.slo),
        {"json": (), "csv": (*(f"{name}_ms" for name in _SLOS), "itl_statistic")},
    ),
    Figure("slo_missed", "", _of_goodput(lambda good: good.missed), _JSON),
    Figure("slo_missed_alone", "", _of_goodput(lambda good: good.missed_alone), _JSON),
    Figure(
        "reading",
        "",
        lambda r: _reading_json(r.figures.reading),
        {"json": (), "own table": (), "csv": ("late_tokens", "interrupted_requests")},
        definition=_define("reading"),
    ),
    Figure(
        "steps",
        "count",
        _of_memory(lambda used: used.steps),
        {"comparison": (), "ratios": ()},
        label="steps",
        definition={"steps": "forward passes of the engine, however long each took"},
    ),
    Figure(
        "peak_kv_share",
        "share",
        _of_memory(lambda used: used.peak_kv_share),
        {"json": (), "totals": ()},
        label="peak KV",
        definition=_define("peak KV"),
        text=_peak_kv_text,
    ),
    Figure(
        "kv_waste",
        "share",
        _of_memory(lambda used: used.kv_waste),
        {"json": (), "ratios": ()},
        label="KV waste",
        definition=_define("KV waste"),
    ),
    Figure(
        "peak_kv_bytes",
        "bytes",
        _of_memory(lambda used: used.peak_kv),
        {"json": (), "ratios": ()},
        label="peak KV",
        definition=_define("peak KV"),
    ),
    Figure(
        "peak_memory_bytes",
        "bytes",
        _of_memory(lambda used: used.peak),
        {"json": (), "totals": (), "ratios": ()},
        label="peak memory",
        definition=_define("peak memory"),
        text=_of_memory(lambda used: None if used.peak is None else human_bytes(used.peak)),
    ),
    Figure("memory", "", _memory_json, _JSON),
    Figure("token_counts", "", lambda r: r.figures.tokens.source, _CSV),
    Figure("warnings", "", lambda r: list(r.figures.warnings), _JSON),
    Figure("warmup", "count", lambda r: r.experiment.warmup, _JSON),
    Figure("engine", "", lambda r: dict(r.experiment.engine), {"json": (), "csv object": ()}),
)


def figures_in(place: Place) -> list[Figure]:
    """Return the figures shown in a place."""
    return [figure for figure in FIGURES if place in figure.shown_in]


def paths_in(place: Place) -> list[tuple[Figure, tuple[str, ...]]]:
    """Return the figures shown in a place, each with the path in the JSON report of every value shown there."""
    found: list[tuple[Figure, tuple[str, ...]]] = []
    for figure in figures_in(place):
        parts = figure.shown_in[place]
        found += [(figure, (figure.name, part)) for part in parts] if parts else [(figure, (figure.name,))]
    return found


def look_up(report: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """Return the value at a path in a JSON report; None if the path ends early."""
    value: Any = report
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def as_json(experiment: Experiment, figures: Measurement) -> dict[str, Any]:
    """Return a run's report for JSON. Times are in milliseconds, rates per second; null if the run cannot tell."""
    run = MeasuredRun(experiment, figures)
    report = {figure.name: figure.json(run) for figure in figures_in("json")}
    return {**report, "definitions": {**DEFINITIONS, **definitions_in("json")}}


def definitions_in(*places: Place, run: MeasuredRun | None = None) -> dict[str, str]:
    """Return the definitions of the figures shown in these places, without those that `run` (if any) cannot tell."""
    return {
        term: sentence
        for figure in FIGURES
        if not figure.shown_in.keys().isdisjoint(places) and (run is None or figure.get(run) is not None)
        for term, sentence in figure.definition.items()
    }
