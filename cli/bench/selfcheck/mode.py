"""`bench --self-check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.result import Result
from llmsched.cli.bench.selfcheck.check import Check, Outcome, Verdict
from llmsched.cli.bench.selfcheck.run import self_check
from llmsched.engine.progress import Progress

_MARKS: dict[Verdict, str] = {"right": "", "disturbed": "disturbed", "wrong": "OFF"}


async def bench_self(progress: Progress) -> Result:
    """Measure a server whose times are known. Raises LlmschedError if it cannot be started."""
    outcomes = await self_check(progress)
    report = as_json(outcomes)
    return Result(report, lambda: show(outcomes), report["right"], [])


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The checks for scripts. Times are in ms, rates per second; `error` is measured - server.

    `right` is true if all figures are. What is not may be `wrong`, or not be known because the probe was disturbed.
    """
    return {
        "measured": True,
        "right": all(outcome.verdict == "right" for outcome in outcomes),
        "wrong": any(outcome.verdict == "wrong" for outcome in outcomes),
        "probes": [
            {
                "probe": outcome.probe.name,
                "verdict": outcome.verdict,
                "tries": outcome.tries,
                "held_up_ms": 1e3 * outcome.held_up,
            }
            for outcome in outcomes
        ],
        "checks": [
            {**asdict(check), "error": check.error, "right": check.right, "verdict": check.verdict}
            for outcome in outcomes
            for check in outcome.checks
        ],
    }


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the checks for a person."""
    render.say("MEASURED: the bench itself, against a server in another process whose times are known")
    for outcome in outcomes:
        probe, columns = outcome.probe, ["", "by script", "server did", "measured", "error", "allowed", ""]
        render.table(f"{probe.name}: {probe.what} (times in ms)", columns, [_row(check) for check in outcome.checks])
    for sentence in conclusions(outcomes):
        render.say(sentence)


def conclusions(outcomes: Sequence[Outcome]) -> list[str]:
    """What follows from the checks, in sentences."""
    found, checks = [], [check for outcome in outcomes for check in outcome.checks]
    if again := [f"{outcome.probe.name} ({outcome.tries} tries)" for outcome in outcomes if outcome.tries > 1]:
        found.append(f"tried again, because this machine was busy with other work: {', '.join(again)}")
    if wrong := _named(checks, "wrong"):
        found.append(
            f"off: {wrong}, by more than other work on this machine explains. What it measures now is off by as much; "
            "bench from another one"
        )
    if unknown := _named(checks, "disturbed"):
        most = max(outcome.held_up for outcome in outcomes if outcome.verdict != "right")
        found.append(
            f"not known: {unknown}. Other work kept the bench waiting for up to {render.human_seconds(most)}; "
            "load this machine less, or bench from another one"
        )
    if not (wrong or unknown):
        found.append(f"all {len(checks)} figures are right within what is allowed")
    return found


def _named(checks: Sequence[Check], verdict: Verdict) -> str:
    return ", ".join(f"{check.probe} {check.figure}" for check in checks if check.verdict == verdict)


def _row(check: Check) -> list[str]:
    figures = (check.script, check.server, check.measured, check.error, check.allowed)
    cells = ["n/a" if figure is None else f"{figure:.2f}".removesuffix(".00") for figure in figures]
    return [check.figure, *cells, _MARKS[check.verdict]]
