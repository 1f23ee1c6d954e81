"""Comparison of engine settings (variants). In each round, one variant after another serves the same requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llmsched.cli.figures.engine_counts import EngineCounts
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.kv_memory import merged
from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.figures.record import RequestRecord, RunRecord
from llmsched.cli.load.load import Load
from llmsched.cli.targets.interface import RunPlan
from llmsched.engine.progress import Progress


class VariantRun(NamedTuple):
    record: RunRecord
    experiment: Experiment


#: Function that runs a load on a new engine with the settings of the named variant.
RunVariant = Callable[[str, Load, Progress], Awaitable[VariantRun]]


@dataclass(frozen=True, slots=True)
class VariantResult:
    name: str
    experiment: Experiment
    figures: Measurement  # of all rounds together
    rounds: tuple[Measurement, ...]  # figures of each round


async def compare(
    names: Sequence[str], run_variant: RunVariant, plan: RunPlan, rounds: int, progress: Progress
) -> list[VariantResult]:
    """Run the load with each variant, `rounds` times. Each round draws new requests, the same for all variants."""
    runs: dict[str, list[VariantRun]] = {name: [] for name in names}
    for number in range(rounds):
        workload = plan.workload.with_seed(plan.workload.seed + number)
        for name, done in runs.items():

            def report(_: str, done: int, total: int, name: str = name, number: int = number) -> None:
                progress(f"{name}, round {number + 1}", done, total)

            done.append(await run_variant(name, workload, report))
    results = []
    for name, done in runs.items():
        records = [run.record for run in done]
        each = tuple(measure(record, plan.workload, plan.slo) for record in records)
        whole = measure(concatenated(records), plan.workload, plan.slo)
        results.append(VariantResult(name, done[-1].experiment, with_mean_rates(each, whole), each))
    return results


def with_mean_rates(rounds: Sequence[Measurement], whole: Measurement) -> Measurement:
    """Return `whole` with its steady-state and request rates replaced by means over `rounds`."""
    if len(rounds) == 1:
        return whole
    # The ramp-up and ramp-down of each round would distort the rates of `whole`.
    means: dict[str, Any] = {}
    for name in ("output_tokens_steady", "requests_steady", "scheduled", "achieved"):
        known = [rate for one in rounds if (rate := getattr(one.rates, name)) is not None]
        means[name] = sum(known) / len(known) if len(known) == len(rounds) else None
    return replace(whole, rates=replace(whole.rates, steady_window=None, **means))


def concatenated(runs: Sequence[RunRecord]) -> RunRecord:
    """Join runs into one, in which each run starts when the previous one ends."""
    records: list[RequestRecord] = []
    now = 0.0
    for run in runs:
        moved = [record.moved(now - run.start, len(records)) for record in run.records]
        now = max((record.end for record in moved if record.end is not None), default=now)
        records += moved
    lags = [run.loop_lags for run in runs if run.loop_lags is not None]
    meters = [run.meter for run in runs if run.meter is not None]
    return RunRecord(
        records,
        EngineCounts.sum([run.counts for run in runs]),
        [lag for some in lags for lag in some] if lags else None,
        runs[0].own_process,
        memory=runs[-1].memory,
        meter=merged(meters) if meters else None,
    )
