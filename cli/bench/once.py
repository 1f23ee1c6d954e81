"""The plain bench: one run of the load."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from llmsched.cli.bench.output.report import as_json, show
from llmsched.cli.bench.result import Measured, Result
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import RequestFailed, RequestRecord, RunRecord
from llmsched.cli.load.load import Load
from llmsched.cli.targets.interface import OpenTarget, RunPlan, TargetUnreachableError
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance


async def bench_once(
    opening: AbstractAsyncContextManager[OpenTarget], url: str | None, plan: RunPlan, progress: Progress
) -> Result:
    """Open a target and load it. A server (`url`) that nobody can connect to is a run in which every request failed."""
    try:
        async with opening as opened:
            figures = await opened.measure(plan.workload, plan.slo, progress)
            experiment = opened.experiment(plan.workload, plan.slo)
    except TargetUnreachableError as problem:
        assert url is not None
        figures = measure(_none_sent(plan.workload, str(problem)), plan.workload, plan.slo)
        experiment = Experiment(url, Provenance(url), plan.workload, plan.slo, plan.warmup or 0)
    well = not figures.requests.failed and figures.requests.completed > 0
    report = as_json(experiment, figures)
    return Result(report, lambda: show(experiment, figures), well, [report], Measured(experiment, figures))


def _none_sent(workload: Load, why: str) -> RunRecord:
    """The records of a run against a server that nobody can connect to."""
    failure = RequestFailed("connect", f"nothing was sent: {why}")
    return RunRecord([RequestRecord(index, scheduled=0.0, failure=failure) for index in range(workload.num_requests)])
