"""The figures of a run as tables and sentences, for whoever prints them."""

from __future__ import annotations

from typing import NamedTuple

from llmsched.cli import render
from llmsched.cli.figures import kv_memory
from llmsched.cli.figures.latency_summary import LatencySummary
from llmsched.cli.figures.measure import Measurement
from llmsched.engine.latency import DEFINITIONS, Slo


class Table(NamedTuple):
    """Cells as text; the first column holds words."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def latency_table(figures: Measurement) -> Table:
    columns = ["", "mean", "P50", "P95", "P99", "P99 (95 % sure)", "max", "samples"]
    return Table("latency in ms", columns, [_latency_row(figures, name) for name in ("ttft", "itl", "tpot", "e2e")])


def totals_table(figures: Measurement) -> Table:
    due = "" if figures.rates.scheduled is None else f"due {figures.rates.scheduled:.2f}"
    asked = "" if figures.rates.asked is None else f"asked {figures.rates.asked:g}"
    wanted = ", ".join(part for part in (due, asked) if part)
    lag = figures.client.send.p99
    rows = [
        ["completed / failed", f"{figures.requests.completed} / {figures.requests.failed}"],
        [
            "tokens in / out",
            f"{'n/a' if figures.tokens.input is None else figures.tokens.input} / {figures.tokens.output}",
        ],
        ["duration", f"{figures.duration:.2f} s"],
        ["output tokens/s", _rate(figures.rates.output_tokens)],
        ["  without ramp and drain", _rate(figures.rates.output_tokens_steady)],
        ["requests/s", _rate(figures.rates.requests)],
        ["  without ramp and drain", _rate(figures.rates.requests_steady)],
        ["sent requests/s", _rate(figures.rates.achieved) + (f" ({wanted})" if wanted else "")],
        [
            "prefix hit rate",
            "n/a" if figures.tokens.prefix_hit_rate is None else f"{figures.tokens.prefix_hit_rate:.1%}",
        ],
        ["preemptions", "n/a" if figures.requests.preemptions is None else str(figures.requests.preemptions)],
        [
            "worst stall",
            "n/a" if figures.latency.worst_stall is None else render.human_seconds(figures.latency.worst_stall),
        ],
        ["client lag P99", "n/a" if lag is None else render.human_seconds(lag)],
    ]
    if (use := figures.memory) is not None:
        rows += _memory_rows(use)
    return Table("", ["", ""], rows)


def _memory_rows(use: kv_memory.MemoryUsage) -> list[list[str]]:
    share = f"{use.peak_kv_share:.1%}"
    if use.parts is None or use.peak_kv is None or use.peak is None:
        return [["peak KV", f"{share} of KV memory"]]
    peak_kv, all_kv = render.human_bytes(use.peak_kv), render.human_bytes(use.parts.kv)
    return [["peak KV", f"{peak_kv}, {share} of {all_kv}"], ["peak memory", render.human_bytes(use.peak)]]


def slo_table(slo: Slo, figures: Measurement) -> Table | None:
    """How well each SLO was met; None without one."""
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
    if figures.requests.failed:
        rows.append(["not served", "", "", str(figures.requests.failed), ""])
    missed = (figures.requests.completed + figures.requests.failed) * (1 - good.attainment["all"])
    rows.append(["all", "", f"{good.attainment['all']:.1%}", str(round(missed)), ""])
    # A goodput of zero is a figure, and is seen to be one.
    title = f"goodput {f'{good.requests_per_s:.3g}' if good.requests_per_s else '0.0'} requests/s"
    return Table(title, ["SLO", "limit", "met by", "requests that missed it", "and no other"], rows)


def stall_table(figures: Measurement) -> Table | None:
    """The worst stalls; None if no request had a second token."""
    rows = [
        [str(number), render.human_seconds(stall.seconds), f"{stall.at:.2f}", str(stall.tokens_before)]
        for number, stall in figures.latency.stalls
    ]
    return Table("worst stalls", ["request", "length", "after s of the run", "after its token"], rows) if rows else None


def reading_sentence(figures: Measurement) -> str | None:
    """What a reader would have noticed; None if there was nothing to read."""
    if (reading := figures.reading) is None:
        return None
    longest = "" if reading.waits.max is None else f", at worst for {render.human_seconds(reading.waits.max)}"
    return (
        f"a reader at {reading.tokens_per_s:g} tokens/s would have waited in {reading.interrupted:.1%} of requests "
        f"for {reading.late_tokens:.1%} of tokens{longest}"
    )


def definitions(slo: Slo, figures: Measurement) -> dict[str, str]:
    """The definitions of what the tables show."""
    names = ["TTFT", "ITL", "TPOT", "E2E", "percentiles"]
    names += ["P99 interval"] if any(one.p99_ci95 for one in (figures.latency.ttft, figures.latency.itl)) else []
    names += ["steady"] if figures.rates.output_tokens_steady is not None else []
    names += ["goodput"] if figures.goodput else []
    names += ["SLO of ITL"] if slo.itl is not None else []
    names += ["stall"] if figures.latency.stalls else []
    names += ["reading"] if figures.reading else []
    if (use := figures.memory) is not None:
        names += ["peak KV"] if use.parts is None else ["peak KV", "peak memory"]
    return {name: {**DEFINITIONS, **kv_memory.DEFINITIONS}[name] for name in names}


def failures(figures: Measurement) -> list[str]:
    """A sentence per reason for which requests failed."""
    total = figures.requests.completed + figures.requests.failed
    return [
        f"{count} of {total} requests failed: {reason}{f' ({detail})' if detail else ''}"
        for reason, count in figures.requests.failures.items()
        for detail in (figures.requests.failure_examples[reason],)
    ]


def _latency_row(figures: Measurement, name: str) -> list[str]:
    summary: LatencySummary = getattr(figures.latency, name)
    interval = summary.p99_ci95
    known = [_ms(value) for value in (summary.mean, summary.p50, summary.p95, summary.p99)]
    between = "n/a" if interval is None else f"{_ms(interval[0])} to {_ms(interval[1])}"
    return [name.upper(), *known, between, _ms(summary.max), str(summary.count)]


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e3:.1f}"


def _rate(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
