"""`bench --compare`."""

from __future__ import annotations

from llmsched.cli.bench.compare.comparison import ComparisonPlan, RunVariant, compare
from llmsched.cli.bench.compare.report import as_json, charts, notes, show, table
from llmsched.cli.bench.compare.variant_engines import SimulatedVariants, VariantEngines
from llmsched.cli.bench.compare.variants import check_given, configure, parse_variants
from llmsched.cli.bench.modes import Modes
from llmsched.cli.bench.result import Result
from llmsched.cli.options.engine_flags import EngineOptions
from llmsched.cli.targets.interface import RunPlan
from llmsched.cli.targets.simulated_target import refuse_warmup
from llmsched.engine.errors import LlmschedError
from llmsched.engine.progress import Progress

_DEFAULT_ROUNDS = 2


def refuse_server(url: str) -> None:
    """Raise LlmschedError: the settings of a server cannot be changed from here."""
    raise LlmschedError(
        f"--compare runs each variant in this process, and {url} is a server, whose settings cannot be changed from "
        "here; name a model, or start the server anew for each setting and bench it with the same --seed"
    )


async def bench_variants(
    model: str,
    simulate: str | None,
    options: EngineOptions,
    modes: Modes,
    plan: RunPlan,
    progress: Progress,
    quantization: str | None = None,
) -> Result:
    """Do the plan's work under each variant, in this process or as on the device to `simulate`, where `quantization`
    is another form of the model's weights.

    Raises ModelError, ConfigError, and LlmschedError for wrong variants.
    """
    assert modes.compare is not None
    variants = parse_variants(modes.compare)
    check_given(variants, options.given)
    base = options.config(model, {"max_queue_size": max(2048, plan.workload.num_requests)})
    configs = configure(base, variants)
    rounds = _DEFAULT_ROUNDS if modes.rounds is None else modes.rounds
    run_variant: RunVariant
    if simulate is None:
        engines = VariantEngines(configs, progress)
        engines.check()
        warmup, run_variant = 1 if plan.warmup is None else plan.warmup, engines
    else:
        refuse_warmup(plan)
        warmup, run_variant = 0, SimulatedVariants(configs, simulate, progress, quantization)
    task = ComparisonPlan(plan.workload, plan.slo, plan.timeout, warmup, rounds)
    compared = await compare(list(configs), run_variant, task, progress)
    report = as_json(compared, task)
    well = all(not run["failed"] and run["completed"] for run in report["runs"])
    experiment = compared[0].experiment
    return Result(
        report,
        lambda: show(report, experiment),
        well,
        report["runs"],
        notes=notes(report, experiment),
        tables=[table(report)],
        charts=charts(compared),
    )
