from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from llmsched.cli.bench.compare.comparison import RunVariant, compare
from llmsched.cli.bench.compare.comparison_report import comparison_content, comparison_json
from llmsched.cli.bench.compare.variant_engines import VariantEngines, simulated_variants
from llmsched.cli.bench.compare.variants import check_given, configure, parse_variants
from llmsched.cli.bench.knee.knee_exploration import KneeLimits, check, explore
from llmsched.cli.bench.knee.knee_report import knee_content, knee_json
from llmsched.cli.bench.knee.knee_search import ATTAINMENT, TOLERANCE
from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.report.report_content import ReportContent, Result
from llmsched.cli.bench.report.run_report import run_content
from llmsched.cli.figures.experiment import Experiment, MeasuredRun
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import RequestFailed, RequestRecord, RunRecord
from llmsched.cli.figures.registry import as_json
from llmsched.cli.targets.interface import OpenTarget, RunPlan, TargetUnreachableError
from llmsched.cli.targets.simulated_replicas import ONE_REPLICA, Replication
from llmsched.cli.targets.simulated_target import refuse_warmup
from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import LlmschedError
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance

Opening = AbstractAsyncContextManager[OpenTarget]


async def bench_target(
    opening: Opening,
    url: str | None,
    modes: ModeFlags,
    plan: RunPlan,
    progress: Progress,
) -> Result:
    """Open a target and run the load once or, with --find-knee, search for the knee."""
    if modes.find_knee:
        return await _bench_knee(opening, modes, plan, progress)
    return await _bench_once(opening, url, plan, progress)


async def _bench_once(opening: Opening, url: str | None, plan: RunPlan, progress: Progress) -> Result:
    content = None
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
        advice = "check that the server runs and that host and port are right"
        content = ReportContent(errors=[f"{url} accepts no connection ({problem}), so nothing was sent; {advice}"])
    well = not figures.requests.failed and figures.requests.completed > 0
    run, report = MeasuredRun(experiment, figures), as_json(experiment, figures)
    return Result(report, content or run_content(run), well, [report], run)


async def bench_compare(
    base: EngineConfig,
    given: Mapping[str, Any],
    simulate: str | None,
    modes: ModeFlags,
    plan: RunPlan,
    progress: Progress,
    quantization: str | None = None,
    replication: Replication = ONE_REPLICA,
) -> Result:
    """Run the load with each variant and compare the figures. Raises LlmschedError for invalid variants.

    `base` has the settings that a variant omits, `given` the settings set by flags.
    """
    assert modes.compare is not None
    variants = parse_variants(modes.compare)
    check_given(variants, given)
    configs = configure(base, variants)
    run_variant: RunVariant
    if simulate is None:
        run_variant = engines = VariantEngines(configs, plan, progress)
        engines.check()
    else:
        refuse_warmup(plan)
        run_variant = simulated_variants(configs, simulate, plan, progress, quantization, replication)
    compared = await compare(list(configs), run_variant, plan, 2 if modes.rounds is None else modes.rounds, progress)
    report = comparison_json(compared)
    well = all(not run["failed"] and run["completed"] for run in report["runs"])
    return Result(report, comparison_content(report, compared), well, report["runs"])


async def _bench_knee(opening: Opening, modes: ModeFlags, plan: RunPlan, progress: Progress) -> Result:
    limits = KneeLimits(
        modes.max_request_rate,
        ATTAINMENT if modes.knee_attainment is None else modes.knee_attainment,
        TOLERANCE if modes.knee_tolerance is None else modes.knee_tolerance,
    )
    check(plan.workload, limits)
    try:
        async with opening as opened:
            found = await explore(opened, plan, limits, progress)
            experiment = opened.experiment(plan.workload, found.slo)
    except TargetUnreachableError as problem:
        raise LlmschedError(f"the target is unreachable, so there is no knee to find: {problem}") from problem
    report, well = knee_json(plan, found), found.knee.verdict != "never met"
    run = None if found.at_knee is None else found.at_knee.run
    detail = replace(run_content(run), title=f"the run at the knee, {found.knee.rate:.3g} requests/s") if run else None
    rows = [attempt.report for attempt in found.attempts]
    return Result(report, knee_content(report, experiment), well, rows, run, detail)
