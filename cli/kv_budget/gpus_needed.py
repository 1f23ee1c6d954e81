"""Number of GPUs that serve the users of a demand within latency targets, found by simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmsched.cli import render
from llmsched.cli.kv_budget.analysis import BudgetAnalysis
from llmsched.cli.options.flags import flag
from llmsched.engine.errors import ConfigError
from llmsched.engine.memory.remedies import MemoryDemand

if TYPE_CHECKING:
    from llmsched.engine.blueprint import Blueprint
    from llmsched.engine.goodput import Slo

#: This share of requests must meet every target.
ATTAINMENT = 0.95
#: Share of a request's tokens that is prompt.
PROMPT_SHARE = 0.75
#: Requests at a time in a simulation, and their tokens. Of more GPUs, only as many as serve these are simulated, with
#: their share of the users.
_MOST_REQUESTS, _MOST_TOKENS = 1_000, 200_000
#: Requests at a time on one GPU beyond which simulations take too long.
_MOST_PER_GPU = 2_000
#: Requests that count in a simulation, at least. With fewer, one slow request alone would miss the attainment.
_LEAST_REQUESTS = 20
#: Output tokens of a request, at most, so that simulations of long contexts end soon. All other tokens are prompt.
_MOST_OUTPUT = 4_096


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a simulation of `gpus` GPUs, each with a replica behind the router. Times are in seconds."""

    gpus: int
    attainment: float  # share of requests that met every target
    ttft_p99: float | None
    tpot_p99: float | None

    def as_json(self) -> dict[str, Any]:
        times = {"ttft_p99_ms": self.ttft_p99, "tpot_p99_ms": self.tpot_p99}
        milliseconds = {name: None if time is None else time * 1e3 for name, time in times.items()}
        return {"gpus": self.gpus, "attainment": self.attainment, **milliseconds}


@dataclass(frozen=True, slots=True)
class GpusNeeded:
    """Simulations of several numbers of GPUs, the smallest number first."""

    demand: MemoryDemand
    slo: Slo
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial | None:
        """Trial with the fewest GPUs that meets the targets; None if even a GPU for each user does not."""
        return next((trial for trial in self.trials if trial.attainment >= ATTAINMENT), None)

    @property
    def targets(self) -> str:
        return " and ".join(f"{name.upper()} {render.human_seconds(at)}" for name, at in self.slo.given().items())

    def as_json(self) -> dict[str, Any]:
        return {
            "gpus": None if self.best is None else self.best.gpus,
            "slo": {f"{name}_ms": limit * 1e3 for name, limit in self.slo.given().items()},
            "attainment_target": ATTAINMENT,
            "simulated": [trial.as_json() for trial in self.trials],
        }


def find_gpus_needed(analysis: BudgetAnalysis, slo: Slo) -> GpusNeeded:
    """Find the fewest GPUs that serve all users of `analysis.demand` at the same time within the targets `slo`.

    The search begins with the number whose memory holds all requests, and ends with a GPU for each user. Raises
    ConfigError if this cannot be simulated.
    """
    from llmsched.engine.blueprint import gpu_blueprint

    demand, least, config = analysis.demand, analysis.demand.num_replicas(analysis.plan), analysis.config
    if analysis.gpu is None:
        raise ConfigError("gpu", "is not named")
    if least is None:
        raise ConfigError(
            "context", "does not fit one of these GPUs; use a larger one, or tensor parallelism in another engine"
        )
    if config.lora or analysis.plan.adapters.count:
        raise ConfigError("lora", "adapters are not simulated")
    if demand.users > _MOST_PER_GPU * least:
        raise ConfigError("users", f"more than {_MOST_PER_GPU:,} per GPU are not simulated")
    blueprint = gpu_blueprint(analysis.planner, config, analysis.gpu)
    trials: dict[int, Trial] = {}

    def suffice(gpus: int) -> bool:
        trials[gpus] = _simulate(blueprint, demand, gpus, slo)
        return trials[gpus].attainment >= ATTAINMENT

    low, high = least - 1, least  # `low` GPUs do not suffice
    while not (enough := suffice(high)) and high < demand.users:
        low, high = high, min(2 * high, demand.users)
    while enough and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffice(middle) else (middle, high)
    return GpusNeeded(demand, slo, tuple(trials[gpus] for gpus in sorted(trials)))


def _simulate(blueprint: Blueprint, demand: MemoryDemand, gpus: int, slo: Slo) -> Trial:
    """Simulate users of whom each sends a request as soon as its last one ends. Their first requests do not count."""
    from llmsched.cli.figures.measure import measure
    from llmsched.cli.load.random_lengths import RandomLengths
    from llmsched.cli.load.synthetic_load import SyntheticLoad
    from llmsched.cli.targets.simulated_replicas import Replication
    from llmsched.cli.targets.simulated_target import simulate_run

    each = demand.users / gpus
    replicas = min(gpus, max(1, int(min(_MOST_REQUESTS, _MOST_TOKENS / demand.context) / each)))
    users = -(-demand.users * replicas // gpus)
    output_len = min(_MOST_OUTPUT, max(1, demand.context - round(PROMPT_SHARE * demand.context)))
    load = SyntheticLoad(
        num_prompts=users + max(_LEAST_REQUESTS, users),
        input_len=max(1, demand.context - output_len),
        output_len=RandomLengths(-(-output_len // 2), output_len),  # equal lengths would keep the users in step
        max_concurrency=users,
    )
    run = simulate_run(blueprint, load, replication=Replication(replicas))
    figures = measure(replace(run, records=run.records[users:]), load, slo)
    attainment = 0.0 if figures.goodput is None else figures.goodput.attainment["all"]
    return Trial(gpus, attainment, figures.latency.ttft.p99, figures.latency.tpot.p99)


def document(analysis: BudgetAnalysis, slo: Slo) -> dict[str, Any] | None:
    """Return the JSON document of the simulations, or None if they are not possible."""
    try:
        return find_gpus_needed(analysis, slo).as_json()
    except ConfigError:
        return None


def show(analysis: BudgetAnalysis, slo: Slo) -> None:
    """Print the simulations, or why they are not possible."""
    try:
        needed = find_gpus_needed(analysis, slo)
    except ConfigError as problem:
        render.say(f"GPUs needed: not simulated ({problem.text(flag)})")
        return
    rows = [
        (f"{trial.gpus:,}", f"{trial.attainment:.1%}", _seconds(trial.ttft_p99), _seconds(trial.tpot_p99))
        for trial in needed.trials
    ]
    render.table(
        f"Replicas, each on one {analysis.device.name} (SIMULATED)",
        ("GPUs", "requests within", "P99 TTFT", "P99 TPOT"),
        rows,
    )
    goal = f"{needed.demand.users:,} users at a time, {ATTAINMENT:.0%} of requests within {needed.targets}"
    best = "no number of these GPUs is enough" if needed.best is None else f"GPUs needed: {needed.best.gpus:,}"
    render.say(f"{best} for {goal} (SIMULATED)")


def _seconds(time: float | None) -> str:
    return "-" if time is None else render.human_seconds(time)
