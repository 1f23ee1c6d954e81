from __future__ import annotations

from typing import Any

from llmsched.cli import render
from llmsched.cli.kv_budget.analysis import BudgetAnalysis
from llmsched.cli.kv_budget.gpus_needed import PROMPT_SHARE
from llmsched.profiles.calibrated import LOCAL

#: Default length of the sequences in tokens.
_DEFAULT_LENGTH = 2048


def simulate(analysis: BudgetAnalysis, device: str) -> tuple[dict[str, Any], list[str]] | None:
    """Simulate a closed loop on `device` with as many running requests as admission allows, but at most --users.

    Return the JSON document (times in milliseconds, rates per second) and sentences about its accuracy, or None if the
    model does not fit. Raises ConfigError for an unknown GPU, or if "local" was not calibrated with this model.
    """
    from llmsched.cli.figures.measure import measure
    from llmsched.cli.load.synthetic_load import SyntheticLoad
    from llmsched.cli.targets.simulated_target import simulate_run
    from llmsched.engine.blueprint import gpu_blueprint, local_blueprint
    from llmsched.engine.goodput import Slo

    if not analysis.plan.fits:
        return None
    planner, config = analysis.planner, analysis.config
    blueprint = local_blueprint(planner, config) if device == LOCAL else gpu_blueprint(planner, config, device)
    plan, provenance = blueprint.plan, blueprint.provenance
    length = max(2, min(analysis.demand.context or analysis.mean_len or _DEFAULT_LENGTH, plan.max_model_len))
    output_len = max(1, length - round(PROMPT_SHARE * length))
    concurrency = plan.num_admitted_at(length)
    if analysis.has_demand:
        concurrency = min(analysis.demand.users, concurrency)
    load = SyntheticLoad(
        num_prompts=2 * concurrency,
        input_len=length - output_len,
        output_len=output_len,
        max_concurrency=concurrency,
    )
    figures = measure(simulate_run(blueprint, load), load, Slo())
    tpot, ttft = figures.latency.tpot.p50, figures.latency.ttft.p50
    document = {
        **{name: value for name, value in provenance.as_json().items() if name != "refused_by_serve"},
        "device": plan.device.name,
        "concurrency": concurrency,
        "input_len": length - output_len,
        "output_len": output_len,
        "output_tokens_per_s": figures.rates.output_tokens_steady or figures.rates.output_tokens,
        "tpot_ms": None if tpot is None else tpot * 1e3,
        "ttft_ms": None if ttft is None else ttft * 1e3,
        "preemptions": figures.requests.preemptions,
    }
    return document, provenance.caveats()


def show(document: dict[str, Any], caveats: list[str]) -> None:
    medians = "".join(
        f", {name} {render.human_seconds(value / 1e3)}"
        for name, value in (("TPOT", document["tpot_ms"]), ("TTFT", document["ttft_ms"]))
        if value is not None
    )
    render.say(
        f"SIMULATED {document['concurrency']:,} requests at a time, each {document['input_len']:,} tokens in and "
        f"{document['output_len']:,} out: {document['output_tokens_per_s'] or 0.0:,.0f} output tokens/s"
        f"{medians} (medians)"
    )
    for caveat in caveats:
        render.say(caveat)
