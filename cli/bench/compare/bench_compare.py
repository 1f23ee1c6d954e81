"""`bench --compare`."""

from __future__ import annotations

from llmsched.cli.bench.compare.comparison import ComparisonPlan, RunVariant, compare
from llmsched.cli.bench.compare.comparison_report import comparison_content, comparison_json
from llmsched.cli.bench.compare.variant_engines import SimulatedVariants, VariantEngines
from llmsched.cli.bench.compare.variants import check_given, configure, parse_variants
from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.report.report_content import Result
from llmsched.cli.options.engine_flags import EngineOptions
from llmsched.cli.targets.interface import RunPlan
from llmsched.cli.targets.simulated_target import refuse_warmup
from llmsched.engine.errors import LlmschedError
from llmsched.engine.progress import Progress

_DEFAULT_ROUNDS = 2


def refuse_server(url: str) -> None:
    """Raise LlmschedError: the settings of a running server cannot be changed from here."""
    raise LlmschedError(
        f"--compare runs each variant in this process, and {url} is a server, whose settings cannot be changed from "
        "here; name a model, or restart the server with each setting and bench it with the same --seed"
    )


async def bench_compare(
    model: str,
    simulate: str | None,
    options: EngineOptions,
    modes: ModeFlags,
    plan: RunPlan,
    progress: Progress,
    quantization: str | None = None,
) -> Result:
    """Run the plan's load under each variant, in this process or simulated on the device `simulate`.

    `quantization` replaces the format of a simulated model's weights. Raises ModelError, ConfigError, and LlmschedError
    for invalid variants.
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
    comparison = ComparisonPlan(plan.workload, plan.slo, plan.timeout, warmup, rounds)
    compared = await compare(list(configs), run_variant, comparison, progress)
    report = comparison_json(compared, comparison)
    well = all(not run["failed"] and run["completed"] for run in report["runs"])
    return Result(report, comparison_content(report, compared), well, report["runs"])
