"""How a comparison is shown: the figures of each variant side by side, and how they relate to the first one's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from llmsched.cli import render
from llmsched.cli.bench.compare.comparison import ComparisonPlan, VariantResult
from llmsched.cli.bench.output import report
from llmsched.cli.bench.output.tables import Table
from llmsched.cli.chart import Chart, Series, distribution
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.kv_memory import MemoryUsage
from llmsched.engine.latency import RequestLatency

#: Said wherever these figures are.
DEFINITIONS = {
    "steps": "forward passes of the engine, however long each took",
    "KV waste": "share of the KV memory held by requests that had no KV in it, on average over the steps",
    "peak KV": "the most KV memory that requests held after any step",
    "peak memory": "weights, activations and the most KV that requests held at once: what the work needs; the engine "
    "reserves more where there is more",
}


class _Figure(NamedTuple):
    """One row: the path in a run's JSON, its name, and what it is shown in."""

    path: tuple[str, ...]
    name: str
    unit: str


_FIGURES = (
    _Figure(("output_tokens_per_s",), "output tokens/s", ""),
    _Figure(("requests_per_s",), "requests/s", ""),
    _Figure(("goodput_rps",), "goodput, requests/s", ""),
    *(
        _Figure((f"{name.lower()}_ms", percentile), f"{name} {percentile.upper()}", "ms")
        for name in ("TTFT", "ITL", "TPOT", "E2E")
        for percentile in ("p50", "p95", "p99")
    ),
    _Figure(("worst_stall_ms",), "worst stall", "ms"),
    _Figure(("steps",), "steps", "count"),
    _Figure(("kv_waste",), "KV waste", "share"),
    _Figure(("peak_kv_bytes",), "peak KV", "bytes"),
    _Figure(("peak_memory_bytes",), "peak memory", "bytes"),
    _Figure(("preemptions",), "preemptions", "count"),
)


#: What is told of every round.
_OF_A_ROUND = (
    *("completed", "failed", "valid", "duration_s", "output_tokens_per_s", "output_tokens_per_s_steady"),
    *("ttft_ms", "itl_ms", "e2e_ms"),
)


def as_json(variants: Sequence[VariantResult], task: ComparisonPlan) -> dict[str, Any]:
    """`runs` in the order of the command line, and the `ratios` of all but the first to the first.

    Each run has all that `bench --json` has, of all rounds together, and `rounds` with the main figures of each. A
    ratio is null where it cannot be formed.
    """
    runs = [_run(variant, task) for variant in variants]
    first, *others = runs
    return {
        "measured": all(run["measured"] for run in runs),
        "baseline": first["policy"],
        "rounds": task.rounds,
        "runs": runs,
        "ratios": {run["policy"]: _ratios(run, first) for run in others},
        "definitions": dict(DEFINITIONS),
    }


def show(document: dict[str, Any], experiment: Experiment) -> None:
    """Print what `as_json` made for a person; `experiment` is that of any variant."""
    for note in notes(document, experiment):
        render.say(note)
    render.table(*table(document))
    runs = document["runs"]
    for name in ("TTFT", "ITL", "TPOT", "E2E", "percentiles"):
        render.say(f"{name}: {runs[0]['definitions'][name]}")
    for name, meaning in document["definitions"].items():
        render.say(f"{name}: {meaning}")
    for run in runs:
        for reason, count in run["failures"].items():
            render.error(f"{run['policy']}: {count} requests failed: {reason} ({run['failure_examples'][reason]})")
    for warning in dict.fromkeys(warning for run in runs for warning in run["warnings"]):
        render.warn(warning)


def notes(document: dict[str, Any], experiment: Experiment) -> list[str]:
    """What was done, how far it is to be trusted, and how much the rounds differ."""
    rounds, first = document["rounds"], document["baseline"]
    if rounds == 1:
        return [f"{experiment.headline()}; 1 round", *experiment.provenance.caveats()]
    by_round = [
        f"output tokens/s by round, {name} / {first}: {', '.join(map(_times, ratios['output_tokens_per_s_by_round']))}"
        for name, ratios in document["ratios"].items()
    ]
    return [
        f"{experiment.headline()}; {rounds} rounds, interleaved, with the next seeds",
        *experiment.provenance.caveats(),
        *by_round,
    ]


def table(document: dict[str, Any]) -> Table:
    """The figures of the variants side by side, then their ratios to the first."""
    runs, ratios = document["runs"], document["ratios"]
    first, *others = runs
    columns = ["", *(run["policy"] for run in runs), *(f"{run['policy']} / {first['policy']}" for run in others)]
    rows = []
    for figure in _FIGURES:
        values = [_value(run, figure.path) for run in runs]
        if any(value is not None for value in values):
            relations = [ratios[run["policy"]][_key(figure)] for run in others]
            rows.append([figure.name, *(_shown(value, figure.unit) for value in values), *map(_times, relations)])
    return Table("all rounds together; latencies in ms", columns, rows)


def charts(variants: Sequence[VariantResult]) -> list[Chart]:
    """How TTFT, ITL and E2E are distributed, a line for each variant."""

    def chart(name: str, samples: Callable[[RequestLatency], Iterable[float]]) -> Chart:
        lines = (
            Series(one.name, distribution([1e3 * x for latency in one.figures.latencies for x in samples(latency)]))
            for one in variants
        )
        return Chart(f"distribution of {name}", "ms, logarithmic", "% of samples up to it", tuple(lines), log_x=True)

    return [
        chart("TTFT", lambda latency: [latency.ttft]),
        chart("ITL", lambda latency: latency.itl),
        chart("E2E", lambda latency: [latency.e2e]),
    ]


def _run(variant: VariantResult, task: ComparisonPlan) -> dict[str, Any]:
    experiment, looked = variant.experiment, report.as_json(variant.experiment, variant.figures)
    # An engine that refused every request took no step.
    used = variant.figures.memory or MemoryUsage(0, 0, 0.0, None, None, variant.figures.run.memory)
    assert used.parts is not None
    return {
        "policy": variant.name,
        **looked,
        "steps": used.steps,
        "peak_kv_share": used.peak_kv_share,
        "peak_kv_bytes": used.peak_kv,
        "peak_memory_bytes": used.peak,
        "memory": {
            "steps": used.steps,
            "kv_waste": used.kv_waste,
            "peak_kv": used.peak_kv,
            "weights": used.parts.weights,
            "activations": used.parts.activations,
            "kv": used.parts.kv,
        },
        "definitions": {**looked["definitions"], **DEFINITIONS},
        "rounds": [_round(task, index, report.as_json(experiment, each)) for index, each in enumerate(variant.rounds)],
    }


def _round(task: ComparisonPlan, index: int, figures: dict[str, Any]) -> dict[str, Any]:
    return {"seed": task.workload.seed + index, **{name: figures[name] for name in _OF_A_ROUND}}


def _ratios(run: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    ratios: dict[str, Any] = {
        _key(figure): _ratio(_value(run, figure.path), _value(first, figure.path)) for figure in _FIGURES
    }
    pairs = zip(run["rounds"], first["rounds"], strict=True)
    name = "output_tokens_per_s"
    return {**ratios, f"{name}_by_round": [_ratio(one[name], other[name]) for one, other in pairs]}


def _key(figure: _Figure) -> str:
    return "_".join(figure.path)


def _value(run: dict[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = run
    for name in path:
        found = found[name]
    return None if found is None else float(found)


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "n/a"
    if unit == "bytes":
        return render.human_bytes(int(value))
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:.0f}" if unit == "count" else f"{value:.1f}" if unit == "ms" else f"{value:.2f}"


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.3g}x"
