from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmsched.cli.bench.compare.comparison import VariantResult
from llmsched.cli.bench.report.report_content import ReportContent, Table
from llmsched.cli.bench.report.run_charts import distribution_chart
from llmsched.cli.figures.experiment import MeasuredRun
from llmsched.cli.figures.kv_memory import MemoryUsage
from llmsched.cli.figures.latency_distributions import latency_samples
from llmsched.cli.figures.registry import Place, Unit, as_json, definitions_in, figures_in, look_up, paths_in
from llmsched.engine.request_latency import DEFINITIONS
from llmsched.engine.units import human_bytes

#: Columns of tables have the names of variants if all have at most this many characters.
_SHORT = 16


def comparison_json(variants: Sequence[VariantResult]) -> dict[str, Any]:
    """Return the JSON report: `runs` with the keys of `bench --json`, and `ratios` of each later run to the first."""
    runs = [_run_json(variant) for variant in variants]
    first, *others = runs
    return {
        "measured": all(run["measured"] for run in runs),
        "baseline": first["policy"],
        "rounds": len(variants[0].rounds),
        "runs": runs,
        "ratios": {run["policy"]: _ratios(run, first) for run in others},
        "definitions": _own_definitions(),
    }


def comparison_content(document: dict[str, Any], variants: Sequence[VariantResult]) -> ReportContent:
    first = MeasuredRun(variants[0].experiment, variants[0].figures)
    terms = definitions_in(Place.RATIOS, first)
    del terms["P99 interval"]
    runs = document["runs"]
    return ReportContent(
        verdict=_verdict(document),
        summary=[(f"output tokens/s, {run['policy']}", _shown(run["output_tokens_per_s"], "/s")) for run in runs]
        + [(f"TTFT P99, {run['policy']}", f"{_shown(run['ttft_ms']['p99'], 'ms')} ms") for run in runs],
        notes=_notes(document, first),
        tables=[_table(document)],
        charts=[
            distribution_chart(
                f"distribution of {name.upper()}",
                {one.name: latency_samples(one.figures.latencies)[name] for one in variants},
            )
            for name in ("ttft", "itl", "e2e")
        ],
        definitions=terms,
        errors=[
            f"{run['policy']}: {count} requests failed: {reason} ({run['failure_examples'][reason]})"
            for run in runs
            for reason, count in run["failures"].items()
        ],
        warnings=list(dict.fromkeys(warning for run in runs for warning in run["warnings"])),
    )


def _verdict(document: dict[str, Any]) -> str:
    found = [
        f"{name}: {_times(ratios['output_tokens_per_s'])} the output tokens/s of {document['baseline']}, "
        f"{_times(ratios['ttft_ms_p99'])} its P99 TTFT"
        for name, ratios in document["ratios"].items()
    ]
    return "; ".join(found)


def _own_definitions() -> dict[str, str]:
    return {term: text for term, text in definitions_in(Place.RATIOS).items() if term not in DEFINITIONS}


def _run_json(variant: VariantResult) -> dict[str, Any]:
    experiment, figures = variant.experiment, variant.figures
    # An engine that refused every request took no step.
    used = figures.memory or MemoryUsage(0, 0, 0.0, None, None, figures.run.memory)
    assert used.parts is not None
    report = as_json(experiment, figures)
    return {
        "policy": variant.name,
        **report,
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
        "definitions": {**report["definitions"], **_own_definitions()},
        "rounds": [
            {
                "seed": experiment.workload.seed + index,
                **{figure.name: figure.json(MeasuredRun(experiment, each)) for figure in figures_in(Place.ROUND)},
            }
            for index, each in enumerate(variant.rounds)
        ],
    }


def _ratios(run: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(run["rounds"], first["rounds"], strict=True)
    name = "output_tokens_per_s"
    return {
        **{"_".join(path): _ratio(look_up(run, path), look_up(first, path)) for _, path in paths_in(Place.RATIOS)},
        f"{name}_by_round": [_ratio(one[name], other[name]) for one, other in pairs],
    }


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _notes(document: dict[str, Any], first: MeasuredRun) -> list[str]:
    experiment, rounds = first.experiment, document["rounds"]
    interleaved = "1 round" if rounds == 1 else f"{rounds} rounds, interleaved, with consecutive seeds"
    by_round = [
        f"output tokens/s by round, {name} / {document['baseline']}: "
        f"{', '.join(map(_times, ratios['output_tokens_per_s_by_round']))}"
        for name, ratios in document["ratios"].items()
        if rounds > 1
    ]
    names = [run["policy"] for run in document["runs"]]
    numbers = [f"{label} {name}" for label, name in zip(_labels(names), names, strict=True) if label != name]
    legend = [f"variants: {'; '.join(numbers)}"] if numbers else []
    return [f"{experiment.headline()}; {interleaved}", *experiment.provenance.caveats(), *legend, *by_round]


def _labels(names: Sequence[str]) -> Sequence[str]:
    return names if max(map(len, names)) <= _SHORT else [f"[{number}]" for number in range(1, len(names) + 1)]


def _table(document: dict[str, Any]) -> Table:
    runs, ratios = document["runs"], document["ratios"]
    first, *others = labels = _labels([run["policy"] for run in runs])
    compared = [f"{label} / {first}" for label in others]
    rows = []
    for figure, path in sorted(paths_in(Place.RATIOS), key=lambda row: {"/s": 0, "ms": 1}.get(row[0].unit, 2)):
        values = [look_up(run, path) for run in runs]
        if any(value is not None for value in values):
            relations = [_times(ratios[run["policy"]]["_".join(path)]) for run in runs[1:]]
            label = " ".join((figure.label, *(part.upper() for part in path[1:])))
            rows.append([label, *(_shown(value, figure.unit) for value in values), *relations])
    return Table("all rounds together; latencies in ms", ["", *labels, *compared], rows, spare=compared)


def _shown(value: float | None, unit: Unit) -> str:
    if value is None:
        return "n/a"
    if unit == "bytes":
        return human_bytes(value)
    return format(value, {"share": ".1%", "count": ".0f", "ms": ".1f"}.get(unit, ".2f"))


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:,.0f}x" if ratio >= 1000 else f"{ratio:.3g}x"
