from __future__ import annotations

from llmsched.cli.bench.report.report_content import ReportContent, Table
from llmsched.cli.bench.report.run_charts import run_charts
from llmsched.cli.figures.experiment import MeasuredRun
from llmsched.cli.figures.latency_distributions import LatencySummary
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.registry import Place, definitions_in, figures_in, format_value
from llmsched.engine.goodput import Slo
from llmsched.engine.percentiles import PERCENTILES
from llmsched.engine.units import human_seconds

#: A terminal shows charts only of runs with at least this many completed requests.
_ENOUGH_TO_DRAW = 10


def run_content(run: MeasuredRun) -> ReportContent:
    """Return the report of a run. If no request was completed, it has only notes, errors and warnings."""
    experiment, figures = run
    counts, conclusions = figures.requests, []
    errors = [
        f"{count} of {counts.completed + counts.failed} requests failed: {reason}{f' ({detail})' if detail else ''}"
        for reason, count in counts.failures.items()
        for detail in (counts.failure_examples[reason],)
    ]
    notes = [experiment.headline(), *experiment.provenance.caveats()]
    if not counts.completed:
        return ReportContent(notes=notes, errors=errors, warnings=figures.warnings)
    if (reading := figures.reading) is not None:
        longest = "" if reading.waits.max is None else f", longest pause {human_seconds(reading.waits.max)}"
        conclusions.append(
            f"at {reading.tokens_per_s:g} tokens/s, a reader had to wait, or the request failed, in "
            f"{reading.interrupted:.1%} of requests; {reading.late_tokens:.1%} of tokens came late{longest}"
        )
    own_tables = (slo_table(experiment.slo, figures), stall_table(figures))
    return ReportContent(
        verdict=verdict(run),
        summary=_summary(run),
        notes=notes,
        tables=[latency_table(run), totals_table(run), *(table for table in own_tables if table is not None)],
        conclusions=conclusions,
        charts=run_charts(figures, experiment.slo),
        terminal_charts=2 if counts.completed >= _ENOUGH_TO_DRAW else 0,
        definitions=definitions(run),
        errors=errors,
        warnings=figures.warnings,
    )


def verdict(run: MeasuredRun) -> str:
    counts, rates, good = run.figures.requests, run.figures.rates, run.figures.goodput
    total = counts.completed + counts.failed
    served = f"all {total} requests were served" if not counts.failed else f"{counts.failed} of {total} requests failed"
    met = "" if good is None else f"; {good.attainment['all']:.1%} met every SLO"
    return f"{served}, {rates.requests or 0:.2f} requests/s and {rates.output_tokens or 0:.1f} output tokens/s{met}"


def _summary(run: MeasuredRun) -> list[tuple[str, str]]:
    latency, good = run.figures.latency, run.figures.goodput
    p99s = {"TTFT": latency.ttft, "ITL": latency.itl, "E2E": latency.e2e}
    shown = [(f"{name} P99", format_value(found.p99, "ms")) for name, found in p99s.items()]
    totals = dict(totals_table(run).rows)
    shown += [(name, totals[name]) for name in ("output tokens/s", "requests/s", "peak memory") if name in totals]
    return shown if good is None else [*shown, ("goodput, requests/s", f"{good.requests_per_s:.2f}")]


def latency_table(run: MeasuredRun) -> Table:
    columns = ["", "mean", *(name.upper() for name in PERCENTILES), "P99 95% CI", "max", "samples"]
    rows = []
    for figure in figures_in(Place.LATENCIES):
        found: LatencySummary = figure.get(*run)
        quantiles = [found.mean, *(getattr(found, name) for name in PERCENTILES)]
        between = "n/a" if found.p99_ci95 is None else " to ".join(map(_ms, found.p99_ci95))
        rows.append([figure.label, *map(_ms, quantiles), between, _ms(found.max), str(found.count)])
    return Table("latency in ms", columns, rows, spare=("max", "samples", "P99 95% CI"))


def totals_table(run: MeasuredRun) -> Table:
    rows = (figure.row(run) for figure in figures_in(Place.TOTALS))
    return Table("", ["", ""], [row for row in rows if row is not None])


def slo_table(slo: Slo, figures: Measurement) -> Table | None:
    if (good := figures.goodput) is None:
        return None
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
    counts = figures.requests
    if counts.failed:
        rows.append(["failed requests", "", "", str(counts.failed), ""])
    missed = (counts.completed + counts.failed) * (1 - good.attainment["all"])
    rows.append(["all", "", f"{good.attainment['all']:.1%}", str(round(missed)), ""])
    # 0.0 shows that a goodput of zero is a figure, not a missing value.
    title = f"goodput {f'{good.requests_per_s:.3g}' if good.requests_per_s else '0.0'} requests/s"
    return Table(title, ["SLO", "limit", "met by", "missed", "missed only this SLO"], rows)


def stall_table(figures: Measurement) -> Table | None:
    rows = [
        [str(number), human_seconds(stall.seconds), f"{stall.at:.2f}", str(stall.tokens_before)]
        for number, stall in figures.latency.stalls
    ]
    return Table("worst stalls", ["request", "length", "start in s", "after token"], rows) if rows else None


def definitions(run: MeasuredRun) -> dict[str, str]:
    figures = run.figures
    terms = definitions_in(Place.LATENCIES | Place.TOTALS | Place.OWN_TABLE, run)
    if not any(figure.get(*run).p99_ci95 for figure in figures_in(Place.LATENCIES)):
        del terms["P99 interval"]
    if run.experiment.slo.itl is None:
        terms.pop("SLO of ITL", None)
    return {**terms, **({"token counts": figures.tokens.source} if figures.tokens.source else {})}


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e3:.1f}"
