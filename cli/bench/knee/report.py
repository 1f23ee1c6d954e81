"""How the search of the knee is shown: rate against latency, and where the knee is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.knee.exploration import Found, Point
from llmsched.cli.bench.output.tables import Table
from llmsched.cli.chart import Chart, Series
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.targets.interface import RunPlan

#: A target keeps up if it serves at least this share of what is sent; less is more than a run's noise.
_KEEPS_UP = 0.95

#: A prefix hit rate that rises by more than this from the first attempt on is no draw of the load.
_HITS_RISE = 0.2

#: Tokens per second of which a fraction says nothing.
_MANY = 100

_KEPT = (
    *("completed", "failed", "valid", "duration_s", "achieved_rate", "requests_per_s", "output_tokens_per_s"),
    *("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "attainment", "goodput_rps", "prefix_hit_rate", "preemptions"),
)


def as_json(plan: RunPlan, found: Found) -> dict[str, Any]:
    """The knee for scripts: its rate (null: none), the rates tried in their order, and `at_knee` with all that
    `bench --json` has of the run there (null: none).
    """
    whole, at_knee = found.points[0].report, None if found.at_knee is None else found.at_knee.report
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
        "points": [_point(point, found) for point in found.points],
        "idle": _some(found.idle),
        "all_at_once": _some(found.burst),
        "at_knee": at_knee,
        **{name: whole[name] for name in ("workload", "warmup", "engine", "definitions")},
    }
    return {**document, "warnings": cautions(document)}


def show(document: dict[str, Any], experiment: Experiment) -> None:
    """Print what `as_json` made of a target, for a person."""
    *before, last = notes(document, experiment)
    for note in before:
        render.say(note)
    render.table(*table(document), text_columns=0)
    render.say(last)
    if len(document["points"]) > 2:
        render.chart(charts(document)[0])
    for name in ("TTFT", "ITL", "TPOT", "E2E", "goodput"):
        render.say(f"{name}: {document['definitions'][name]}")
    for warning in document["warnings"]:
        render.warn(warning)


def cautions(document: dict[str, Any]) -> list[str]:
    """Why the knee may not be where it was found."""
    found = []
    if document["knee_sustained"] is False:
        sent, served = (document["at_knee"][name] for name in ("achieved_rate", "requests_per_s_steady"))
        found.append(
            f"at the knee {sent:.3g} requests/s were sent and {served:.3g} served: more and more were running, so a "
            "longer load (--num-prompts) may find the knee lower"
        )
    hits = [point["prefix_hit_rate"] for point in document["points"] if point["prefix_hit_rate"] is not None]
    if hits and max(hits) > hits[0] + _HITS_RISE:
        found.append(
            f"the prefix hit rate rose from {hits[0]:.0%} to {max(hits):.0%}: the target knows prompts of earlier "
            "rates, as it does the texts of a trace; switch its prefix cache off for the true knee"
        )
    if not all(point["valid"] for point in document["points"]):
        found.append(
            "at some rates nothing was served, or the client itself was late: those figures are not the target's"
        )
    return found


def notes(document: dict[str, Any], experiment: Experiment) -> list[str]:
    """What was done, how far it is to be trusted, what was asked for, and last what came of it."""
    work = experiment.workload.describe_requests()
    origin = experiment.provenance
    found = [
        f"{origin.label} {experiment.name} ({origin.where}): {work}, at one rate after the other",
        *origin.caveats(),
    ]
    if (burst := document["all_at_once"]) is not None:
        found.append(
            f"all at once: {burst['requests_per_s']:.3g} requests/s, {burst['output_tokens_per_s']:.4g} tokens/s"
        )
    if document["slo_from_idle_target"]:
        found.append("no SLO given; 5 times the median of the idle target")
    slo = document["slo"]
    limits = [f"{name.removesuffix('_ms').upper()} {slo[name]:.4g} ms" for name in slo if name.endswith("_ms")]
    found.append(f"SLO: {', '.join(limits)}, met by {document['attainment_goal']:.0%} of requests")
    return [*found, verdict(document)]


def table(document: dict[str, Any]) -> Table:
    """A row for each attempt, in the order of their rates, with the latencies that the SLOs are about."""
    judged = [name for name in ("itl", "tpot", "e2e") if f"{name}_ms" in document["slo"]] or ["itl"]
    columns = [
        "asked/s",
        "served/s",
        "output tokens/s",
        "TTFT P50",
        "TTFT P99",
        *(f"{name.upper()} P99" for name in judged),
    ]
    rows = [_row(point, judged) for point in sorted(document["points"], key=lambda point: point["rate"])]
    return Table("latency in ms", [*columns, "met by", "goodput", ""], rows)


def sustained(figures: dict[str, Any]) -> bool | None:
    """Whether a target served as fast as was sent, ramp and drain left out; None if the run was too short to tell."""
    served, sent = figures["requests_per_s_steady"], figures["achieved_rate"]
    return None if served is None or not sent else served >= _KEEPS_UP * sent


def charts(document: dict[str, Any]) -> list[Chart]:
    """Rate against latency and against goodput, with the knee as it was found."""
    points = sorted(document["points"], key=lambda point: point["rate"])
    slo = document["slo"]

    def line(name: str, percentile: str) -> Series:
        found = [(point["rate"], point[name][percentile]) for point in points]
        label = f"{name.removesuffix('_ms').upper()} {percentile.upper()}"
        return Series(label, [(rate, value) for rate, value in found if value is not None])

    limits = tuple((f"SLO of {name.upper()}", slo[f"{name}_ms"]) for name in ("ttft", "tpot") if f"{name}_ms" in slo)
    latencies = (line("ttft_ms", "p99"), line("ttft_ms", "p50"), line("itl_ms", "p99"), line("tpot_ms", "p99"))
    met = [(point["rate"], 100 * point["attainment"]["all"]) for point in points if point["attainment"]]
    rates = [(point["rate"], point["goodput_rps"]) for point in points if point["goodput_rps"] is not None]
    goal = (("asked for", 100 * document["attainment_goal"]),)
    asked = "requests/s asked for"
    knee = (("knee", document["knee_rps"]),) if document["knee_rps"] is not None else ()
    return [
        Chart("latency by rate", asked, "ms, logarithmic", latencies, log_y=True, limits=limits, marks=knee),
        Chart("requests that met every SLO", asked, "% of requests", (Series("met", met),), limits=goal, marks=knee),
        Chart("goodput", asked, "requests/s", (Series("goodput", rates),), marks=knee),
    ]


def verdict(document: dict[str, Any]) -> str:
    """What came of it, in a sentence."""
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


def _point(point: Point, found: Found) -> dict[str, Any]:
    return {
        "rate": point.rate,
        "met": point.attainment >= found.goal.attainment,
        **{name: point.report[name] for name in _KEPT},
    }


def _some(figures: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if figures is None else {name: figures[name] for name in _KEPT}


def _row(point: dict[str, Any], judged: Sequence[str]) -> list[str]:
    latencies = [point["ttft_ms"]["p50"], *(point[f"{name}_ms"]["p99"] for name in ("ttft", *judged))]
    attainment, goodput, tokens = point["attainment"], point["goodput_rps"], point["output_tokens_per_s"]
    return [
        f"{point['rate']:.3g}",
        "n/a" if point["requests_per_s"] is None else f"{point['requests_per_s']:.2f}",
        "n/a" if tokens is None else f"{tokens:.0f}" if tokens >= _MANY else f"{tokens:.1f}",
        *("n/a" if value is None else f"{value:.1f}" for value in latencies),
        "n/a" if attainment is None else f"{attainment['all']:.1%}",
        "n/a" if goodput is None else f"{goodput:.2f}",
        "met" if point["met"] else "missed",
    ]
