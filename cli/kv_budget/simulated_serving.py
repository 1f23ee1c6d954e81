"""What the sequences that fit would be served at, SIMULATED: the real scheduler on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmsched.cli import render
from llmsched.cli.kv_budget.analysis import Findings
from llmsched.profiles.calibrated import LOCAL

if TYPE_CHECKING:
    from llmsched.cli.figures.measure import Measurement
    from llmsched.engine.blueprint import Blueprint

#: Length of the sequences where no question names one, and the share of it that is prompt.
_LENGTH = 2048
_PROMPT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Served:
    """A closed loop of `concurrency` requests, each of `input_len` and `output_len` tokens."""

    blueprint: Blueprint
    concurrency: int
    input_len: int
    output_len: int
    figures: Measurement


def serve(found: Findings, device: str) -> Served | None:
    """Serve as many sequences as are admitted together, or as were asked for, twice over; None if nothing fits.

    Raises ConfigError for a device that was not calibrated.
    """
    from llmsched.cli.load.synthetic_load import SyntheticLoad
    from llmsched.cli.targets.simulated_target import simulate_workload
    from llmsched.engine.blueprint import gpu_blueprint, local_blueprint
    from llmsched.engine.latency import Slo

    if not found.plan.fits:
        return None
    make = local_blueprint(found.planner, found.config) if device == LOCAL else None
    blueprint = make or gpu_blueprint(found.planner, found.config, device)
    plan = blueprint.plan
    length = max(2, min(found.demand.context or found.mean_len or _LENGTH, plan.max_model_len))
    output_len = max(1, length - round(_PROMPT_SHARE * length))
    most = plan.num_admitted_at(length)
    concurrency = min(found.demand.users, most) if found.asked else most
    load = SyntheticLoad(
        num_prompts=2 * concurrency,
        input_len=length - output_len,
        output_len=output_len,
        max_concurrency=concurrency,
    )
    return Served(blueprint, concurrency, length - output_len, output_len, simulate_workload(blueprint, load, Slo()))


def as_json(served: Served | None) -> dict[str, Any] | None:
    """Times in milliseconds, rates per second; None where nothing fits."""
    if served is None:
        return None
    figures, blueprint = served.figures, served.blueprint
    return {
        **{name: value for name, value in blueprint.provenance.as_json().items() if name != "refused_by_serve"},
        "device": blueprint.plan.device.name,
        "concurrency": served.concurrency,
        "input_len": served.input_len,
        "output_len": served.output_len,
        "output_tokens_per_s": figures.rates.output_tokens_steady or figures.rates.output_tokens,
        "tpot_ms": None if figures.latency.tpot.p50 is None else figures.latency.tpot.p50 * 1e3,
        "ttft_ms": None if figures.latency.ttft.p50 is None else figures.latency.ttft.p50 * 1e3,
        "preemptions": figures.requests.preemptions,
    }


def show(served: Served) -> None:
    """Print it for a person."""
    figures = served.figures
    rate = figures.rates.output_tokens_steady or figures.rates.output_tokens or 0.0
    tpot = "" if figures.latency.tpot.p50 is None else f", TPOT {render.human_seconds(figures.latency.tpot.p50)}"
    ttft = "" if figures.latency.ttft.p50 is None else f", TTFT {render.human_seconds(figures.latency.ttft.p50)}"
    render.say(
        f"SIMULATED {served.concurrency:,} requests at a time of {served.input_len:,} tokens in and "
        f"{served.output_len:,} out: {rate:,.0f} output tokens/s{tpot}{ttft} (medians)"
    )
    for caveat in served.blueprint.provenance.caveats():
        render.say(caveat)
