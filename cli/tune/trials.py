from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.trial_runs import FIGURES, TrialRun, pooled
from llmsched.engine.goodput import Slo
from llmsched.engine.units import three_figures


@dataclass(frozen=True, slots=True)
class Trial:
    """Results of one setting, pooled over its longest runs. Rates are means over these runs, without the ramp-up."""

    setting: Setting
    p99: Mapping[str, float | None]  # seconds, by name in FIGURES
    output_tokens_per_s: float | None
    requests_per_s: float | None
    goodput_rps: float | None
    held: Mapping[str, float]  # figure in seconds that is compared with each SLO, by the SLO's name
    attainment: Mapping[str, float]  # share of requests that met each SLO, by its name, and "all"
    spread: float  # half the range of the token rates, divided by their mean
    completed: int
    failed: int
    rounds: int  # number of all runs of the setting
    longest_run: int  # requests
    miss: float  # largest ratio of a figure to its SLO; 0 without SLOs
    reason: str | None  # why the setting is infeasible or, if `skipped`, not measured
    skipped: bool = False

    @property
    def feasible(self) -> bool:
        return self.reason is None


def judge(setting: Setting, runs: Sequence[TrialRun], slo: Slo) -> Trial:
    """Pool the runs of a setting into a trial. Failed requests, no output or a missed SLO make the trial infeasible."""
    rounds = sum(run.requests > 0 for run in runs)
    broken = next((run.problem for run in runs if run.problem is not None), None)
    longest = max((run.requests for run in runs), default=0)
    runs = [run for run in runs if run.requests == longest]
    met = {name: sum(run.met.get(name, 0) for run in runs) for run in runs for name in run.met}
    total = sum(run.completed + run.failed for run in runs)
    samples = {name: [run.samples[name] for run in runs if name in run.samples] for name in FIGURES}
    limits = slo.given()
    figures = {name: pooled(samples[name], held_statistic(name, slo)) for name in limits}
    held = {name: figure for name, figure in figures.items() if figure is not None}
    missed = [
        f"{figure_name(name, slo)} {three_figures(figure * 1e3)} ms is above {limits[name] * 1e3:g} ms"
        for name, figure in held.items()
        if figure > limits[name]
    ]
    rates = [run.tokens_per_s for run in runs if run.tokens_per_s]
    return Trial(
        setting=setting,
        p99={name: pooled(parts, "p99") for name, parts in samples.items()},
        output_tokens_per_s=_mean([run.tokens_per_s for run in runs]),
        requests_per_s=_mean([run.requests_per_s for run in runs]),
        goodput_rps=_mean([run.goodput_rps for run in runs]),
        held=held,
        attainment={name: count / total for name, count in met.items()} if total else {},
        spread=(max(rates) - min(rates)) / 2 / (sum(rates) / len(rates)) if rates else 0.0,
        completed=sum(run.completed for run in runs),
        failed=sum(run.failed for run in runs),
        rounds=rounds,
        longest_run=longest,
        # Every figure misses an SLO of 0; the floor keeps those misses comparable.
        miss=max((figure / max(limits[name], 1e-9) for name, figure in held.items()), default=0.0),
        reason=broken or ", ".join(missed) or None,
    )


def _mean(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


def held_statistic(name: str, slo: Slo) -> str:
    """Return the statistic that is compared with an SLO: "p99" or, for ITL, the statistic that the user chose."""
    return slo.itl_statistic if name == "itl" else "p99"


def figure_name(name: str, slo: Slo) -> str:
    """Return the name of the figure that is compared with an SLO, such as "P99 TTFT" or "mean ITL"."""
    which = held_statistic(name, slo)
    return f"{which.upper() if which.startswith('p') else which} {name.upper()}"
