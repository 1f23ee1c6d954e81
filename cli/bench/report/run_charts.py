from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from llmsched.cli.chart import Chart, Point, Series, distribution, drawable
from llmsched.cli.figures.kv_memory import TargetState
from llmsched.cli.figures.latency_distributions import latency_samples
from llmsched.cli.figures.measure import Measurement
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.plan import MemoryParts

_TIME = "s after the start"
_GIB = 1 << 30

#: Throughput is averaged over at most _INTERVALS intervals. Each is long enough for a request to get at least
#: _TOKENS_PER_INTERVAL tokens.
_INTERVALS, _TOKENS_PER_INTERVAL = 60, 4


def latency_over_time(figures: Measurement, slo: Slo) -> Chart:
    """Return a chart by due time: latencies of completed requests, and the times until failed requests failed."""
    placed = [(one.record.scheduled - figures.run.start, one.latency) for one in figures.served]
    stalls = [(at, 1e3 * one.worst_stall) for at, one in placed if one.worst_stall is not None]
    failed = [
        (record.scheduled - figures.run.start, 1e3 * (record.end - record.scheduled))
        for record in figures.run.records
        if record.failure is not None and record.end is not None
    ]
    limits = {"TTFT": slo.ttft, "TPOT": slo.tpot}
    return Chart(
        "latency of each request over its due time",
        _TIME,
        "ms, logarithmic",
        (
            Series("TTFT", [(at, 1e3 * one.ttft) for at, one in placed], "dots"),
            Series("TPOT", [(at, 1e3 * one.tpot) for at, one in placed if one.tpot is not None], "dots"),
            Series("worst stall", stalls, "dots"),
            *([Series("failed after", failed, "dots")] if failed else []),
        ),
        log_y=True,
        span=(0.0, figures.duration),
        limits=tuple((f"SLO of {name}", 1e3 * limit) for name, limit in limits.items() if limit is not None),
    )


def distribution_chart(title: str, samples: Mapping[str, Sequence[Sequence[float]]]) -> Chart:
    """Return a chart of cumulative distributions in ms. `samples` are in seconds, in one list per request."""
    lines = [Series(name, distribution([1e3 * x for one in found for x in one])) for name, found in samples.items()]
    return Chart(title, "ms, logarithmic", "% of samples at or below", tuple(lines), log_x=True)


def requests_over_time(figures: Measurement) -> Chart:
    waiting: list[Point] = []
    answered: list[Point] = []
    for record in figures.run.records:
        if record.end is not None:
            first = next((chunk.time for chunk in record.chunks if chunk.text or chunk.tokens), record.end)
            waiting += [(record.scheduled - figures.run.start, 1), (first - figures.run.start, -1)]
            answered += [(first - figures.run.start, 1), (record.end - figures.run.start, -1)]
    series = (
        Series("receiving tokens", _running_total(answered), "steps"),
        Series("waiting for their first token", _running_total(waiting), "steps"),
    )
    return Chart("requests in flight", _TIME, "requests", series)


def _running_total(changes: Sequence[Point]) -> list[Point]:
    at_once: defaultdict[float, float] = defaultdict(float)
    for at, change in changes:
        at_once[at] += change
    times = sorted(at_once)
    return list(zip(times, accumulate(at_once[at] for at in times), strict=True))


def throughput_over_time(figures: Measurement) -> Chart:
    fitting = (
        figures.duration / (_TOKENS_PER_INTERVAL * figures.latency.itl.p50) if figures.latency.itl.p50 else _INTERVALS
    )
    counts = [0] * max(1, min(_INTERVALS, int(fitting)))
    width = figures.duration / len(counts) if figures.duration > 0 else 1.0
    for one in figures.served:
        for arrival in one.arrivals:
            counts[min(len(counts) - 1, max(0, int((arrival.time - figures.run.start) / width)))] += arrival.tokens
    points = [(index * width, count / width) for index, count in enumerate([*counts, counts[-1]])]
    series = Series("of served requests", points if figures.served else [], "steps")
    return Chart("throughput", _TIME, "output tokens/s", (series,))


def queue_over_time(samples: Sequence[TargetState]) -> Chart:
    series = (
        Series("running", [(sample.time, sample.running) for sample in samples], "steps"),
        Series("waiting", [(sample.time, sample.waiting) for sample in samples], "steps"),
    )
    return Chart("requests in the scheduler", _TIME, "requests", series)


def memory_over_time(samples: Sequence[TargetState], memory: MemoryParts | None) -> Chart:
    """Return a chart of the memory in use in GiB or, if `memory` is unknown, of KV memory in percent."""
    unit, scale = ("% of KV memory", 100.0) if memory is None else ("GiB", memory.kv / _GIB)
    held = [(s.time, s.kv_held or 0.0, s.kv_empty or 0.0, s.kv_cached or 0.0) for s in samples]
    parts = [Series("KV used or reserved", [(at, scale * used) for at, used, _, _ in held])]
    if any(sample.kv_empty is not None for sample in samples):
        parts = [
            Series("KV used", [(at, scale * max(0.0, used - empty)) for at, used, empty, _ in held]),
            Series("KV reserved, still empty", [(at, scale * empty) for at, _, empty, _ in held]),
        ]
    if any(sample.kv_cached is not None for sample in samples):
        parts.append(Series("KV cached", [(at, scale * cached) for at, _, _, cached in held]))
    whole, title = scale, "KV memory in use"
    if memory is not None:
        fixed = {"weights": memory.weights, "activations": memory.activations, "other": memory.other}
        parts = [Series(name, [(at, size / _GIB) for at, *_ in held]) for name, size in fixed.items() if size] + parts
        whole += sum(fixed.values()) / _GIB
        title = f"memory in use, of {whole:.1f} GiB"
    chart = Chart(title, _TIME, unit, tuple(parts), stacked=True)
    most = max((y for _, y in drawable(chart).series[-1].points), default=0.0)
    return replace(chart, limits=(("all memory", whole),)) if most > whole / 2 else chart


def run_charts(figures: Measurement, slo: Slo) -> list[Chart]:
    samples = {name.upper(): found for name, found in latency_samples(figures.latencies).items()}
    charts = [
        latency_over_time(figures, slo),
        distribution_chart("distribution of latencies", samples),
        throughput_over_time(figures),
        requests_over_time(figures),
    ]
    if figures.samples:
        charts.append(queue_over_time(figures.samples))
    if any(sample.kv_held is not None for sample in figures.samples):
        charts.append(memory_over_time(figures.samples, figures.run.memory))
    return [replace(chart, span=(0.0, figures.duration)) if chart.x == _TIME else chart for chart in charts]
