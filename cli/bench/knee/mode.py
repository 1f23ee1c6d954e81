"""`bench --find-knee`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from llmsched.cli.bench.knee.exploration import Wish, check, explore
from llmsched.cli.bench.knee.report import as_json, charts, notes, show, table
from llmsched.cli.bench.modes import Modes
from llmsched.cli.bench.result import Measured, Result
from llmsched.cli.targets.interface import OpenTarget, RunPlan, TargetUnreachableError
from llmsched.engine.errors import LlmschedError
from llmsched.engine.progress import Progress

_ATTAINMENT, _TOLERANCE = 0.9, 0.1


async def bench_knee(
    opening: AbstractAsyncContextManager[OpenTarget], modes: Modes, plan: RunPlan, progress: Progress
) -> Result:
    """Open a target and look for its knee. Raises LlmschedError as `explore` does, and if nobody answers."""
    wish = Wish(
        modes.max_request_rate,
        _ATTAINMENT if modes.knee_attainment is None else modes.knee_attainment,
        _TOLERANCE if modes.knee_tolerance is None else modes.knee_tolerance,
    )
    check(plan.workload, wish)
    try:
        async with opening as opened:
            found = await explore(opened, plan, wish, progress)
            report = as_json(plan, found)
            experiment = opened.experiment(plan.workload, found.slo)
            rows = [point.report for point in found.points]
            figures = None if found.at_knee is None else found.at_knee.figures
            run = None if figures is None else Measured(experiment, figures)
    except TargetUnreachableError as problem:
        raise LlmschedError(f"nobody answers, so there is no knee to find: {problem}") from problem
    well = found.knee.verdict != "never met"
    return Result(
        report,
        lambda: show(report, experiment),
        well,
        rows,
        run,
        notes=notes(report, experiment),
        tables=[table(report)],
        charts=charts(report),
    )
