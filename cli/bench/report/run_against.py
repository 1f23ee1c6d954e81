"""`bench --against`: comparison of a run's figures with a saved run's figures, by 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from llmsched.cli.bench.report.report_content import ReportContent, Table
from llmsched.cli.load.load import Load
from llmsched.engine.errors import LlmschedError

#: Share by which intervals may lie apart.
TOLERANCE = 0.05
#: Settings of a load that do not change which requests are sent when.
_FREE = ("load", "prompt_seed", "trace_notes", "fingerprint")

Interval = tuple[float, float]
Verdict = Literal["worse", "better", "same"]


class Comparison(NamedTuple):
    """One figure in both runs, latencies in ms. The verdict is None if a run lacks the confidence interval."""

    name: str
    before: float | None
    now: float | None
    before_ci95: Interval | None
    now_ci95: Interval | None
    verdict: Verdict | None


class _Compared(NamedTuple):
    name: str
    lower_is_better: bool
    read: Callable[[Mapping[str, Any]], tuple[float | None, Interval | None]]


def check_comparable(earlier: Mapping[str, Any], workload: Load, measured: bool) -> None:
    """Raise LlmschedError if the saved run `earlier` had another load, or if only one of the runs is simulated."""
    if earlier["measured"] != measured:
        kinds = ["measured" if each else "simulated" for each in (earlier["measured"], measured)]
        raise LlmschedError(
            f"--against: the saved run was {kinds[0]} and this run is {kinds[1]}; compare runs of one kind"
        )
    before, now = earlier["workload"], workload.parameters()
    if before.get("fingerprint") == now["fingerprint"]:
        return
    names = [name for name in {**before, **now} if name not in _FREE and before.get(name) != now.get(name)]
    changes = ", ".join(f"{name} {before.get(name)} -> {now.get(name)}" for name in names)
    raise LlmschedError(
        f"--against: the saved run had another load ({changes}), so their figures cannot be compared; use the same "
        "flags, or save a run with these"
    )


def compare_runs(earlier: Mapping[str, Any], report: Mapping[str, Any], tolerance: float) -> list[Comparison]:
    """Compare the JSON reports of two runs of the same load.

    A figure is worse or better only if the confidence intervals lie apart by more than the share `tolerance`.
    """
    found = []
    for figure in _COMPARED:
        (before, old), (now, new) = figure.read(earlier), figure.read(report)
        verdict = None if old is None or new is None else judge(old, new, tolerance, figure.lower_is_better)
        if before is not None or now is not None:
            found.append(Comparison(figure.name, before, now, old, new, verdict))
    return found


def judge(before: Interval, now: Interval, tolerance: float, lower_is_better: bool) -> Verdict:
    higher = now[0] > before[1] * (1 + tolerance)
    lower = now[1] < before[0] * (1 - tolerance)
    if not higher and not lower:
        return "same"
    return "worse" if higher is lower_is_better else "better"


def against_content(earlier: Mapping[str, Any], compared: list[Comparison]) -> ReportContent:
    rows = [
        [
            one.name,
            *map(_text, (one.before, one.now)),
            *map(_span, (one.before_ci95, one.now_ci95)),
            one.verdict or "n/a",
        ]
        for one in compared
    ]
    columns = ["", "before", "now", "before 95% CI", "now 95% CI", ""]
    table = Table(f"against the saved run of {earlier['target']} ({earlier['where']}); latencies in ms", columns, rows)
    return ReportContent(tables=[table], conclusions=[_conclusion(compared)])


def _conclusion(compared: list[Comparison]) -> str:
    worse, better = ([one.name for one in compared if one.verdict == verdict] for verdict in ("worse", "better"))
    if worse:
        return f"WORSE than the saved run: {', '.join(worse)}" + (f"; better: {', '.join(better)}" if better else "")
    return (
        f"better than the saved run: {', '.join(better)}"
        if better
        else "same as the saved run, within the confidence intervals"
    )


def _latency(name: str, statistic: str) -> _Compared:
    def read(report: Mapping[str, Any]) -> tuple[float | None, Interval | None]:
        summary = report[f"{name.lower()}_ms"]
        return summary[statistic], _pair(summary.get(f"{statistic}_ci95"))

    return _Compared(f"{name} {statistic.upper() if statistic != 'mean' else statistic}", True, read)


def _throughput(report: Mapping[str, Any]) -> tuple[float | None, Interval | None]:
    rate = report["output_tokens_per_s_steady"]
    return report["output_tokens_per_s"] if rate is None else rate, _pair(report.get("output_tokens_per_s_ci95"))


def _failed(report: Mapping[str, Any]) -> tuple[float | None, Interval | None]:
    failed, total = report["failed"], report["failed"] + report["completed"]
    return (failed / total, wilson_interval(failed, total)) if total else (None, None)


def _attainment(report: Mapping[str, Any]) -> tuple[float | None, Interval | None]:
    share, total = (report.get("attainment") or {}).get("all"), report["failed"] + report["completed"]
    return (None, None) if share is None else (share, wilson_interval(share * total, total))


def wilson_interval(count: float, total: int) -> Interval:
    """Return the 95 % confidence interval of a share (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    z2, share = 1.96**2, count / total
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = 1.96 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def _pair(value: Any) -> Interval | None:
    return None if value is None else (float(value[0]), float(value[1]))


def _all() -> Iterator[_Compared]:
    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        for statistic in ("mean", "p99"):
            yield _latency(name, statistic)
    yield _Compared("output tokens/s", False, _throughput)
    yield _Compared("share of requests that failed", True, _failed)
    yield _Compared("share of requests that met every SLO", False, _attainment)


_COMPARED = tuple(_all())


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def _span(interval: Interval | None) -> str:
    return "n/a" if interval is None else " to ".join(map(_text, interval))
