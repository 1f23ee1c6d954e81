"""`bench --self-check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.result import Result
from llmsched.cli.bench.selfcheck.check import PROBES, Check, self_check
from llmsched.engine.progress import Progress


async def bench_self(progress: Progress) -> Result:
    """Measure a server whose times are known. Raises LlmschedError if it cannot be started."""
    checks = await self_check(progress)
    report = as_json(checks)
    return Result(report, lambda: show(checks), report["right"], [])


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks for scripts. Times are in ms, rates per second; `error` is measured - server."""
    return {
        "measured": True,
        "right": all(check.right for check in checks),
        "checks": [{**asdict(check), "error": check.error, "right": check.right} for check in checks],
    }


def show(checks: Sequence[Check]) -> None:
    """Print the checks for a person."""
    render.say("MEASURED: the bench itself, against a server in another process whose times are known")
    for probe in PROBES:
        rows = [_row(check) for check in checks if check.probe == probe.name]
        columns = ["", "by script", "server did", "measured", "error", "allowed", ""]
        render.table(f"{probe.name}: {probe.what} (times in ms)", columns, rows)
    wrong = [f"{check.probe} {check.figure}" for check in checks if not check.right]
    if wrong:
        render.say(
            f"off: {', '.join(wrong)}. What this machine measures now is off by as much; load it less, or bench from "
            "another one"
        )
    else:
        render.say(f"all {len(checks)} figures are right within what is allowed")


def _row(check: Check) -> list[str]:
    figures = (check.script, check.server, check.measured, check.error, check.allowed)
    cells = ["n/a" if figure is None else f"{figure:.2f}".removesuffix(".00") for figure in figures]
    return [check.figure, *cells, "" if check.right else "OFF"]
