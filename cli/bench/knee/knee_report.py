from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from llmsched.cli.bench.knee.knee_exploration import SLACK, Exploration
from llmsched.cli.bench.report.report_content import ReportContent, Table
from llmsched.cli.chart import Chart, Series
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.registry import Place, figures_in
from llmsched.cli.targets.interface import RunPlan

#: A target keeps up if it serves at least this share of the rate sent. The rest allows for noise.
_KEEPS_UP = 0.95

#: A rise of the prefix hit rate by more than this after the first attempt means that prompts were repeated.
_HITS_RISE = 0.2

#: Tables show token rates without decimals if the rate is at least this many tokens per second.
_MANY = 100


def knee_json(plan: RunPlan, found: Exploration) -> dict[str, Any]:
    """Return the JSON report: the knee's rate, the attempts in order, and the report of the run at the knee, if any."""
    whole, at_knee = found.attempts[0].report, None if found.at_knee is None else found.at_knee.report
    document = {
        **{name: whole[name] for name in ("measured", "calibration_error", "refused_by_serve", "target", "where")},
        "verdict": found.knee.verdict,
        "knee_rps": found.knee.rate,
        "missed_rps": found.knee.missed,
        "knee_sustained": None if at_knee is None else sustained(at_knee),
        "attainment_goal": found.goal.attainment,
        "tolerance": found.goal.tolerance,
        "lowest_rps": found.goal.low,
        "highest_rps": found.goal.high,
        "slo": whole["slo"],
        "slo_from_idle_target": not plan.slo.given(),
        "points": [
            {"rate": one.rate, "met": one.attainment >= found.goal.attainment, **_main_figures(one.report)}
            for one in found.attempts
        ],
        "idle": None if found.idle is None else _main_figures(found.idle),
        "all_at_once": None if found.burst is None else _main_figures(found.burst),
        "at_knee": at_knee,
        "workload": plan.workload.parameters(),
        **{name: whole[name] for name in ("warmup", "engine", "definitions")},
    }
    return {**document, "warnings": cautions(document)}


def knee_content(document: dict[str, Any], experiment: Experiment) -> ReportContent:
    names = ("TTFT", "ITL", "TPOT", "E2E", "goodput")
    return ReportContent(
        verdict=verdict(document),
        summary=_summary(document),
        notes=_notes(document, experiment),
        tables=[_table(document)],
        charts=_charts(document),
        terminal_charts=1 if len(document["points"]) > 2 else 0,
        definitions={name: document["definitions"][name] for name in names},
        warnings=document["warnings"],
    )


def cautions(document: dict[str, Any]) -> list[str]:
    """Return reasons why the true knee may differ from the knee found."""
    found = []
    if document["knee_sustained"] is False:
        sent, served = (document["at_knee"][name] for name in ("achieved_rate", "requests_per_s_steady"))
        found.append(
            f"at the knee {sent:.3g} requests/s were sent and {served:.3g} served: the backlog kept growing, so a "
            "longer load (--num-prompts) may find a lower knee"
        )
    hits = [point["prefix_hit_rate"] for point in document["points"] if point["prefix_hit_rate"] is not None]
    if hits and max(hits) > hits[0] + _HITS_RISE:
        found.append(
            f"the prefix hit rate rose from {hits[0]:.0%} to {max(hits):.0%}: prompts repeat from one rate to the next "
            "(as texts of a trace do) and are cached; disable the target's prefix cache to find the true knee"
        )
    if not all(point["valid"] for point in document["points"]):
        found.append(
            "at some rates nothing was served or the client itself was late: those figures do not describe the target"
        )
    return found


def _notes(document: dict[str, Any], experiment: Experiment) -> list[str]:
    work, origin = experiment.workload.describe_requests(), experiment.provenance
    found = [f"{origin.label} {experiment.name} ({origin.where}): {work}, at one request rate after another"]
    found += origin.caveats()
    if (burst := document["all_at_once"]) is not None:
        found.append(
            f"all at once: {burst['requests_per_s']:.3g} requests/s, {burst['output_tokens_per_s']:.4g} tokens/s"
        )
    if document["slo_from_idle_target"]:
        found.append(f"no SLO given: using {SLACK:g} times the medians of the idle target")
    slo = document["slo"]
    limits = [f"{name.removesuffix('_ms').upper()} {_limit(slo[name])} ms" for name in slo if name.endswith("_ms")]
    return [*found, f"SLO: {', '.join(limits)}, met by {document['attainment_goal']:.0%} of requests"]


def _summary(document: dict[str, Any]) -> list[tuple[str, str]]:
    if (found := document["at_knee"]) is None:
        return []
    return [
        ("knee", f"{document['knee_rps']:.3g} requests/s"),
        ("output tokens/s at the knee", _or_na(found["output_tokens_per_s"], ".0f")),
        ("TTFT P99 at the knee", f"{_or_na(found['ttft_ms']['p99'], '.1f')} ms"),
        ("ITL P99 at the knee", f"{_or_na(found['itl_ms']['p99'], '.1f')} ms"),
    ]


def _table(document: dict[str, Any]) -> Table:
    judged = [name for name in ("itl", "tpot", "e2e") if f"{name}_ms" in document["slo"]] or ["itl"]
    latency_columns = ["TTFT P50", "TTFT P99", *(f"{name.upper()} P99" for name in judged)]
    columns = ["requested/s", "served/s", "output tokens/s", *latency_columns, "met by", "goodput", ""]
    rows = []
    for point in sorted(document["points"], key=lambda point: point["rate"]):
        latencies = [point["ttft_ms"]["p50"], *(point[f"{name}_ms"]["p99"] for name in ("ttft", *judged))]
        attainment, tokens = point["attainment"], point["output_tokens_per_s"]
        rows.append(
            [
                f"{point['rate']:.3g}",
                _or_na(point["requests_per_s"], ".2f"),
                _or_na(tokens, ".1f" if tokens is not None and tokens < _MANY else ".0f"),
                *(_or_na(value, ".1f") for value in latencies),
                _or_na(attainment and attainment["all"], ".1%"),
                _or_na(point["goodput_rps"], ".2f"),
                "met" if point["met"] else "missed",
            ]
        )
    rates = [point["rate"] for point in document["points"]]
    twice = "; a rate that was tried twice counts by the mean of both" if len(set(rates)) < len(rates) else ""
    title = f"latency in ms{twice}"
    return Table(title, columns, rows, text_columns=0, spare=("goodput", "output tokens/s", "TTFT P50"))


def _limit(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.4g}"


def _or_na(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def sustained(figures: dict[str, Any]) -> bool | None:
    """Return True if requests were completed about as fast as sent; None if the run was too short to tell."""
    served, sent = figures["requests_per_s_steady"], figures["achieved_rate"]
    return None if served is None or not sent else served >= _KEEPS_UP * sent


def _charts(document: dict[str, Any]) -> list[Chart]:
    slo = document["slo"]

    def line(label: str, get: Callable[[dict[str, Any]], float | None]) -> Series:
        values: dict[float, list[float]] = {}
        for point in document["points"]:
            if (value := get(point)) is not None:
                values.setdefault(point["rate"], []).append(value)
        return Series(label, [(rate, fmean(tried)) for rate, tried in sorted(values.items())])

    def latency(name: str, percentile: str) -> Series:
        return line(f"{name.upper()} {percentile.upper()}", lambda point: point[f"{name}_ms"][percentile])

    limits = tuple((f"SLO of {name.upper()}", slo[f"{name}_ms"]) for name in ("ttft", "tpot") if f"{name}_ms" in slo)
    latencies = (latency("ttft", "p99"), latency("ttft", "p50"), latency("itl", "p99"), latency("tpot", "p99"))
    met = line("met", lambda point: 100 * point["attainment"]["all"] if point["attainment"] else None)
    goodput = line("goodput", lambda point: point["goodput_rps"])
    goal = (("goal", 100 * document["attainment_goal"]),)
    asked = "requested requests/s"
    knee = (("knee", document["knee_rps"]),) if document["knee_rps"] is not None else ()
    return [
        Chart("latency by rate", asked, "ms, logarithmic", latencies, log_y=True, limits=limits, marks=knee),
        Chart("requests that met every SLO", asked, "% of requests", (met,), limits=goal, marks=knee),
        Chart("goodput", asked, "requests/s", (goodput,), marks=knee),
    ]


def verdict(document: dict[str, Any]) -> str:
    share = f"{document['attainment_goal']:.0%}"
    if document["verdict"] == "never met":
        return f"no knee: even at {document['missed_rps']:.3g} requests/s fewer than {share} of requests meet the SLO"
    if document["verdict"] == "always met":
        return (
            f"no knee up to {document['knee_rps']:.3g} requests/s, the highest rate tried: {share} of requests or more "
            "still meet the SLO"
        )
    return (
        f"knee at {document['knee_rps']:.3g} requests/s: {share} of requests or more meet the SLO; at "
        f"{document['missed_rps']:.3g} requests/s they do not"
    )


def _main_figures(report: dict[str, Any]) -> dict[str, Any]:
    return {figure.name: report[figure.name] for figure in figures_in(Place.ATTEMPT)}
