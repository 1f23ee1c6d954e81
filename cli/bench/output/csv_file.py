"""Figures of runs as CSV, a row per run; rows of later runs go below those that are there."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsched.engine.errors import LlmschedError

_SUMMARY = ("mean", "p50", "p95", "p99", "max", "count")
_SLOS = ("ttft", "itl", "tpot", "e2e")
_LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "connect_ms", "client_lag_ms")

#: The columns, each the way to its figure in the JSON report.
COLUMNS = (
    *("measured", "calibration_error", "published_error", "target", "where"),
    *("workload.load", "workload.seed", "workload.fingerprint", "asked_rate", "scheduled_rate", "achieved_rate"),
    *("completed", "failed", "valid", "interrupted", "duration_s", "input_tokens", "output_tokens"),
    *("output_tokens_per_s", "output_tokens_per_s_steady", "requests_per_s", "requests_per_s_steady"),
    *(f"{latency}.{figure}" for latency in _LATENCIES for figure in _SUMMARY),
    *("worst_stall_ms", "prefix_hit_rate", "preemptions", "goodput_rps"),
    *(f"attainment.{name}" for name in (*_SLOS, "all")),
    *(f"slo.{name}_ms" for name in _SLOS),
    *("slo.itl_statistic", "reading.late_tokens", "reading.interrupted_requests", "token_counts"),
)

#: The last columns, each a JSON object: what they hold differs from run to run.
_OBJECTS = ("failures", "workload", "engine")


def check_csv(path: Path) -> None:
    """Raise LlmschedError if `path` has rows with other columns, or cannot be read."""
    if path.exists() and not path.is_file():
        raise LlmschedError(f"--csv {path}: is no file that rows can be added to")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = next(csv.reader(lines), None)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise LlmschedError(f"--csv {path}: {problem}") from problem
    if first is not None and first != [*COLUMNS, *_OBJECTS]:
        raise LlmschedError(f"--csv {path} is there with other columns; name another file, or move it away")


def append_csv(path: Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Add a row for each JSON report, below the header that a new file gets. What is null is an empty cell."""
    check_csv(path)
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow([*COLUMNS, *_OBJECTS])
        for report in reports:
            objects = [json.dumps(report.get(name)) for name in _OBJECTS]
            writer.writerow([*(_cell(_look_up(report, column)) for column in COLUMNS), *objects])


def _look_up(report: Mapping[str, Any], column: str) -> Any:
    """What lies at the end of the way; None where it breaks off."""
    value: Any = report
    for name in column.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, bool) else str(value)
