"""Simulated speed of serving the sequences that fit: the real scheduler on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmsched.cli import render
from llmsched.cli.kv_budget.analysis import BudgetAnalysis
from llmsched.profiles.calibrated import LOCAL

if TYPE_CHECKING:
    from llmsched.cli.figures.measure import Measurement
    from llmsched.engine.blueprint import Blueprint

#: Length of the sequences if no flag names one, and the share of it that is prompt.
_LENGTH = 2048
_PROMPT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class SimulatedServing:
    """Figures of a closed loop of `concurrency` requests, each of `input_len` and `output_len` tokens."""

    blueprint: Blueprint
    concurrency: int
    input_len: int
    output_len: int
    figures: Measurement

    @property
    def output_tokens_per_s(self) -> float | None:
        return self.figures.rates.output_tokens_steady or self.figures.rates.output_tokens

    def as_json(self) -> dict[str, Any]:
        """Return times in milliseconds and rates per second."""
        latency, provenance = self.figures.latency, self.blueprint.provenance
        return {
            **{name: value for name, value in provenance.as_json().items() if name != "refused_by_serve"},
            "device": self.blueprint.plan.device.name,
            "concurrency": self.concurrency,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "output_tokens_per_s": self.output_tokens_per_s,
            "tpot_ms": None if latency.tpot.p50 is None else latency.tpot.p50 * 1e3,
            "ttft_ms": None if latency.ttft.p50 is None else latency.ttft.p50 * 1e3,
            "preemptions": self.figures.requests.preemptions,
        }

    def show(self) -> None:
        """Print one line with the figures, and how far to trust them."""
        latency = {"TPOT": self.figures.latency.tpot.p50, "TTFT": self.figures.latency.ttft.p50}
        medians = "".join(
            f", {name} {render.human_seconds(value)}" for name, value in latency.items() if value is not None
        )
        render.say(
            f"SIMULATED {self.concurrency:,} requests at a time of {self.input_len:,} tokens in and "
            f"{self.output_len:,} out: {self.output_tokens_per_s or 0.0:,.0f} output tokens/s{medians} (medians)"
        )
        for caveat in self.blueprint.provenance.caveats():
            render.say(caveat)


def simulate(analysis: BudgetAnalysis, device: str) -> SimulatedServing | None:
    """Simulate two rounds of as many requests as admission starts together, or as were asked for.

    Returns None if nothing fits. Raises ConfigError for a device that was not calibrated.
    """
    from llmsched.cli.figures.measure import measure
    from llmsched.cli.load.synthetic_load import SyntheticLoad
    from llmsched.cli.targets.simulated_target import simulate_run
    from llmsched.engine.blueprint import gpu_blueprint, local_blueprint
    from llmsched.engine.latency import Slo

    if not analysis.plan.fits:
        return None
    planner, config = analysis.planner, analysis.config
    blueprint = local_blueprint(planner, config) if device == LOCAL else gpu_blueprint(planner, config, device)
    plan = blueprint.plan
    length = max(2, min(analysis.demand.context or analysis.mean_len or _LENGTH, plan.max_model_len))
    output_len = max(1, length - round(_PROMPT_SHARE * length))
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
    return SimulatedServing(blueprint, concurrency, length - output_len, output_len, figures)
