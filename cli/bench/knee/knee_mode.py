"""`bench --find-knee`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from llmsched.cli.bench.knee.knee_exploration import KneeLimits, check, explore
from llmsched.cli.bench.knee.knee_report import knee_content, knee_json
from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.report.report_content import Result
from llmsched.cli.bench.report.run_report import run_content
from llmsched.cli.figures.experiment import MeasuredRun
from llmsched.cli.targets.interface import OpenTarget, RunPlan, TargetUnreachableError
from llmsched.engine.errors import LlmschedError
from llmsched.engine.progress import Progress

_ATTAINMENT, _TOLERANCE = 0.9, 0.1


async def bench_knee(
    opening: AbstractAsyncContextManager[OpenTarget], modes: ModeFlags, plan: RunPlan, progress: Progress
) -> Result:
    """Open a target and search for its knee. Raise LlmschedError as `explore` does, and if none can be opened."""
    limits = KneeLimits(
        modes.max_request_rate,
        _ATTAINMENT if modes.knee_attainment is None else modes.knee_attainment,
        _TOLERANCE if modes.knee_tolerance is None else modes.knee_tolerance,
    )
    check(plan.workload, limits)
    try:
        async with opening as opened:
            found = await explore(opened, plan, limits, progress)
            experiment = opened.experiment(plan.workload, found.slo)
    except TargetUnreachableError as problem:
        raise LlmschedError(f"the target is unreachable, so there is no knee to find: {problem}") from problem
    report = knee_json(plan, found)
    at_knee = None if found.at_knee is None else found.at_knee.figures
    run = None if at_knee is None else MeasuredRun(experiment, at_knee)
    return Result(
        report,
        knee_content(report, experiment),
        found.knee.verdict != "never met",
        [attempt.report for attempt in found.attempts],
        run,
        None if run is None else run_content(run),
    )
