from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsched.cli.bench.report.detailed_file import FORMAT
from llmsched.engine.errors import LlmschedError

#: Largest size of a report in bytes. A larger file is refused.
_MOST_BYTES = 64 << 20


def read_report(flag: str, path: Path) -> Mapping[str, Any]:
    """Read the JSON report of one run, as `bench` writes it with --save, --json or --save-detailed.

    `flag` names the file in messages. Raises LlmschedError if the file cannot be read or has no such report.
    """
    name = f"{flag} {path}".strip()
    try:
        if path.is_char_device():
            raise LlmschedError(f"{name}: is a device, not a file")
        with path.open(encoding="utf-8") as file:
            first = file.readline(_MOST_BYTES)
            report = _detailed(first)
            if report is None:
                report = json.loads(first + file.read(_MOST_BYTES))
    except OSError as problem:
        raise LlmschedError(f"{name}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise LlmschedError(f"{name} was not written by bench --save or --save-detailed: {problem}") from problem
    if not isinstance(report, dict) or not {"workload", "ttft_ms", "completed"} <= report.keys():
        kinds = {"runs": "--compare", "attempts": "--find-knee", "checks": "--self-check"}
        kind = next((mode for key, mode in kinds.items() if isinstance(report, dict) and key in report), None)
        reason = (
            "lacks the figures of a run" if kind is None else f"is a report of bench {kind}, which has several runs"
        )
        raise LlmschedError(f"{name} {reason}; name a file that bench --save has written for one run")
    return report


def _detailed(line: str) -> Any:
    """Return the report in the first line of a --save-detailed file, or None for any other file."""
    try:
        first = json.loads(line)
    except ValueError:
        return None
    return first.get("report") if isinstance(first, dict) and first.get("format") == FORMAT else None
