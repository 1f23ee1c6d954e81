"""CSV file of figures with one row per run. Each `bench --csv` appends its rows to the file."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsched.cli.figures.registry import Place, figures_in, look_up, paths_in
from llmsched.engine.errors import LlmschedError


def csv_columns() -> list[str]:
    """Return the column names: paths in the JSON report, such as ttft_ms.p50."""
    return [
        *(".".join(path) for _, path in paths_in(Place.CSV)),
        *(figure.name for figure in figures_in(Place.CSV_OBJECT)),
    ]


def check_csv(path: Path) -> None:
    """Raise LlmschedError if rows cannot be appended to the file, which need not exist."""
    if path.exists() and not path.is_file():
        raise LlmschedError(f"--csv {path}: is not a regular file; name a file that rows can be appended to")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = next(csv.reader(lines), None)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise LlmschedError(f"--csv {path}: {problem}") from problem
    if first is not None and first != csv_columns():
        raise LlmschedError(f"--csv {path} already exists with other columns; name another file, or move this one away")


def append_csv(path: Path, reports: Sequence[Mapping[str, Any]]) -> None:
    """Append a row for each JSON report, after the header if the file is new. Raises LlmschedError or OSError."""
    check_csv(path)
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if file.tell() == 0:
            writer.writerow(csv_columns())
        for report in reports:
            objects = [json.dumps(report.get(figure.name)) for figure in figures_in(Place.CSV_OBJECT)]
            writer.writerow([*(_cell(look_up(report, path)) for _, path in paths_in(Place.CSV)), *objects])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, bool) else str(value)
