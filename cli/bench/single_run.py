"""The plain bench: one run of the load."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from llmsched.cli.bench.report.report_content import Result
from llmsched.cli.bench.report.run_report import run_content
from llmsched.cli.figures.experiment import Experiment, MeasuredRun
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import RequestFailed, RequestRecord, RunRecord
from llmsched.cli.figures.registry import as_json
from llmsched.cli.targets.interface import OpenTarget, RunPlan, TargetUnreachableError
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance


async def bench_once(
    opening: AbstractAsyncContextManager[OpenTarget], url: str | None, plan: RunPlan, progress: Progress
) -> Result:
    """Open a target and load it once. If the server at `url` is unreachable, every request of the run failed."""
    try:
        async with opening as opened:
            figures = await opened.measure(plan.workload, plan.slo, progress)
            experiment = opened.experiment(plan.workload, plan.slo)
    except TargetUnreachableError as problem:
        assert url is not None
        failure = RequestFailed("connect", f"nothing was sent: {problem}")
        records = [RequestRecord(index, scheduled=0.0, failure=failure) for index in range(plan.workload.num_requests)]
        figures = measure(RunRecord(records), plan.workload, plan.slo)
        experiment = Experiment(url, Provenance(url), plan.workload, plan.slo, plan.warmup or 0)
    well = not figures.requests.failed and figures.requests.completed > 0
    run, report = MeasuredRun(experiment, figures), as_json(experiment, figures)
    return Result(report, run_content(run), well, [report], run)
