"""`bench --compare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsched.cli.bench.compare.comparison import RunVariant, compare
from llmsched.cli.bench.compare.comparison_report import comparison_content, comparison_json
from llmsched.cli.bench.compare.variant_engines import SimulatedVariants, VariantEngines
from llmsched.cli.bench.compare.variants import check_given, configure, parse_variants
from llmsched.cli.bench.mode_flags import ModeFlags
from llmsched.cli.bench.report.report_content import Result
from llmsched.cli.targets.interface import RunPlan
from llmsched.cli.targets.simulated_target import refuse_warmup
from llmsched.engine.config import EngineConfig
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
    base: EngineConfig,
    given: Mapping[str, Any],
    simulate: str | None,
    modes: ModeFlags,
    plan: RunPlan,
    progress: Progress,
    quantization: str | None = None,
) -> Result:
    """Run the plan's load under each variant of `base`, in this process or simulated on the device `simulate`.

    `given` are the settings set by flags. `quantization` replaces the format of a simulated model's weights. Raise
    ModelError, ConfigError, and LlmschedError for invalid variants.
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
        run_variant = SimulatedVariants(configs, simulate, plan, progress, quantization)
    rounds = _DEFAULT_ROUNDS if modes.rounds is None else modes.rounds
    compared = await compare(list(configs), run_variant, plan, rounds, progress)
    report = comparison_json(compared)
    well = all(not run["failed"] and run["completed"] for run in report["runs"])
    return Result(report, comparison_content(report, compared), well, report["runs"])
