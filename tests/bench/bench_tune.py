"""tune against an exhaustive grid on a real model: quality of its choice, and its share of the grid's time.

The grid has every token budget with every number of sequences, each measured in full as often as tune measures the
best. Unless it is given, the ITL limit is one that some budgets clearly meet and others clearly miss. Afterwards tune's
choice and the grid's best run in turn. Then the same grid runs on a virtual clock with step times as calibrated here:
does the simulated choice agree, and what does a different choice cost? MEASURED and SIMULATED in one run; on a shared
machine the P99 varies most.

python tests/bench/bench_tune.py [--model MODEL] [--slo-itl SECONDS | --no-slo]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.tune.explanation import rate_in_words
from llmsched.cli.tune.knob_search import SearchSpace, search
from llmsched.cli.tune.knobs import Setting, describe, powers_of_two
from llmsched.cli.tune.preference import best_trial
from llmsched.cli.tune.race import Race, rung_lengths
from llmsched.cli.tune.runners import EngineRunner, SimulatedRunner, TrialLoad
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import TrialRunner
from llmsched.cli.tune.trials import Trial
from llmsched.engine.blueprint import Blueprint
from llmsched.engine.calibration.timing import measure_device
from llmsched.engine.config import EngineConfig
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent
from llmsched.engine.provenance import Provenance

BUDGETS = tuple(powers_of_two(32, 512))
#: The last is more than ever run at once, so no limit.
SEQS = (1, 2, 3, 128)
GRID = [Setting(tokens, seqs) for tokens, seqs in product(BUDGETS, SEQS)]
START = Setting(BUDGETS[0], SEQS[-1])
#: Runs of each of the two winners against each other.
DUEL = 3


@dataclass(frozen=True)
class GridTask:
    asked: TrialLoad
    requests: int
    rounds: int

    def history(self, *, exact: bool = False) -> TrialHistory:
        return TrialHistory(self.asked.slo, "goodput", START, exact=exact)


async def find_limit(runner: TrialRunner, task: GridTask) -> float:
    """Find an ITL limit in the widest gap between the P99s of the budgets."""
    found = TrialHistory(Slo(), "throughput", START)
    for budget in BUDGETS:
        found.add(await runner.run(Setting(budget, SEQS[-1]), task.requests, 999))
    figures = sorted(trial.p99["itl"] or 1.0 for trial in found.trials())
    below, above = max(pairwise(figures), key=lambda pair: pair[1] / pair[0])
    return float((below * above) ** 0.5)


async def tune(runner: TrialRunner, task: GridTask) -> tuple[TrialHistory, float]:
    """Run tune's search; return its history and its seconds. On a virtual clock every run is in full and runs once."""
    exact = isinstance(runner, SimulatedRunner)
    history, start = task.history(exact=exact), time.perf_counter()
    lengths = rung_lengths(task.requests, task.asked.load.max_concurrency or 1)
    race = Race(runner, history, lengths[-1:], 1) if exact else Race(runner, history, lengths, task.rounds)
    await search(SearchSpace(("max_num_batched_tokens", "max_num_seqs"), BUDGETS, START, SEQS[-1], 0.25), race)
    return history, time.perf_counter() - start


async def measure(
    runner: TrialRunner, task: GridTask, settings: Sequence[Setting], rounds: int, first_round: int
) -> tuple[TrialHistory, float]:
    """Measure every setting in full, in turn, every second round backwards."""
    history, start = task.history(exact=isinstance(runner, SimulatedRunner)), time.perf_counter()
    history.consider(settings)
    for index in range(rounds):
        for setting in settings[:: 1 if index % 2 == 0 else -1]:
            history.add(await runner.run(setting, task.requests, first_round + index))
    return history, time.perf_counter() - start


def calibrated(config: EngineConfig) -> Blueprint:
    measured = measure_device(config, 3, silent)
    assert measured.engine.plan is not None
    per_byte = measured.swap_seconds_per_byte
    return Blueprint(
        measured.engine.config,
        measured.engine.plan,
        measured.cost,
        lambda count: count * per_byte,
        Provenance("this device, as calibrated", measured=False, calibration_error=measured.fit.error),
    )


def show_trials(tuned: TrialHistory) -> None:
    for trial in tuned.trials():
        p99 = trial.p99["itl"]
        itl = "n/a" if p99 is None else f"{1e3 * p99:.1f} ms"
        name = describe(trial.setting, GRID)
        rate = rate_in_words(trial, tuned.goal)
        print(f"  {name}: {trial.rounds} runs, {rate}, P99 ITL {itl}, {trial.reason or 'feasible'}")


def show_grid(measured: TrialHistory, simulated: TrialHistory) -> None:
    print(f"{'budget':>8} {'seqs':>5} | {'MEASURED':>9} {'P99 ITL':>8} {'':>4} | {'SIMULATED':>9} {'P99 ITL':>8}")
    unit = "tokens/s" if measured.goal == "throughput" else "good/s"
    print(f"{'':>8} {'':>5} | {unit:>9} {'ms':>8} {'':>4} | {unit:>9} {'ms':>8}")
    for setting in GRID:
        cells = []
        for trial in (measured.trial(setting), simulated.trial(setting)):
            p99 = trial.p99["itl"]
            itl = "n/a" if p99 is None else f"{1e3 * p99:.1f}"
            rate = trial.output_tokens_per_s if measured.goal == "throughput" else trial.goodput_rps
            cells.append(f"{rate or 0.0:>9.2f} {itl:>8} {'' if trial.feasible else 'no':>4}")
        print(f"{setting.max_num_batched_tokens:>8} {setting.max_num_seqs:>5} | {' | '.join(cells)}")


def told(trial: Trial | None, history: TrialHistory) -> str:
    if trial is None:
        return "none is feasible"
    return f"{describe(trial.setting, GRID)}: {rate_in_words(trial, history.goal)}"


async def compare(runner: EngineRunner, task: GridTask) -> TrialHistory:
    """Print how tune's choice compares with the grid; return the grid's history."""
    tuned, tune_seconds = await tune(runner, task)
    grid, grid_seconds = await measure(runner, task, GRID, task.rounds, 100)
    num_runs = sum(len(runs) for runs in tuned.runs.values())
    print(f"tune: {num_runs} runs in {tune_seconds:.0f} s; grid: {len(GRID) * task.rounds} in {grid_seconds:.0f} s")
    print(f"share of the grid's time: {tune_seconds / grid_seconds:.2f} (wanted: 0.20 or less)")
    show_trials(tuned)
    chosen, best = best_trial(tuned), best_trial(grid)
    print(f"MEASURED choice of tune: {told(chosen, tuned)}")
    print(f"MEASURED best of the grid: {told(best, grid)}")
    if chosen is not None and best is not None:
        share = grid.ranking().share(chosen.setting, best.setting)
        reason = grid.trial(chosen.setting).reason or "feasible"
        print(f"tune's choice in the grid's runs: {share:.3f} of the best; there {reason}")
        if chosen.setting != best.setting:
            await duel(runner, task, chosen.setting, best.setting)
    return grid


async def duel(runner: EngineRunner, task: GridTask, chosen: Setting, best: Setting) -> None:
    """Measure tune's choice and the grid's best in turn, free of the selection bias of the earlier runs."""
    found, _ = await measure(runner, task, [chosen, best], DUEL, 200)
    share = found.ranking().share(chosen, best)
    print(f"against each other, {DUEL} times in turn: {share:.3f} (wanted: 0.95 or more)")
    for setting in (chosen, best):
        print(f"  {describe(setting, GRID)}: {found.trial(setting).reason or 'feasible'}")


async def compare_simulated(blueprint: Blueprint, task: GridTask, grid: TrialHistory) -> None:
    """Print the choice made on a virtual clock, and what that choice gave when it was measured."""
    runner, best = SimulatedRunner(blueprint.engine, task.asked), best_trial(grid)
    simulated, seconds = await measure(runner, task, GRID, 1, 100)
    found, tune_seconds = await tune(runner, task)
    show_grid(grid, simulated)
    print(f"SIMULATED best of the grid ({seconds:.1f} s): {told(best_trial(simulated), simulated)}")
    print(f"SIMULATED choice of tune ({tune_seconds:.1f} s): {told(best_trial(found), found)}")
    for name, trial in (("best", best_trial(simulated)), ("choice", best_trial(found))):
        if trial is not None and best is not None:
            share = grid.ranking().share(trial.setting, best.setting)
            reason = grid.trial(trial.setting).reason or "feasible"
            agrees = "agrees" if trial.setting == best.setting else "differs"
            print(f"the simulated {name} {agrees}; measured it is {share:.3f} of the measured best, {reason}")


async def measured(config: EngineConfig, task: GridTask, find_slo: bool) -> tuple[GridTask, TrialHistory]:
    """Return the task with its limit, and the grid's history."""
    runner = EngineRunner(config, task.asked, silent)
    try:
        if task.asked.slo.itl is None and find_slo:
            task = replace(task, asked=task.asked._replace(slo=Slo(itl=await find_limit(runner, task))))
            await runner.close()
            runner = EngineRunner(config, task.asked, silent)
        load, limit = task.asked.load, task.asked.slo.itl
        wanted = "no SLO" if limit is None else f"P99 ITL at most {1e3 * limit:.1f} ms"
        print(f"{load.describe_requests()}, {load.describe()}; {wanted}")
        return task, await compare(runner, task)
    finally:
        await runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slo-itl", type=float, default=None, help="seconds")
    parser.add_argument("--no-slo", action="store_true", help="the most throughput, whatever the latency")
    options = parser.parse_args()
    load = SyntheticLoad(
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        max_concurrency=options.concurrency,
    )
    config = EngineConfig(options.model, dtype=options.dtype, max_num_batched_tokens=BUDGETS[-1])
    task = GridTask(TrialLoad(load, Slo(itl=options.slo_itl), 600.0), options.num_prompts, options.rounds)
    task, grid = asyncio.run(measured(config, task, not options.no_slo))
    start = time.perf_counter()
    blueprint = calibrated(config)
    print(f"calibrated in {time.perf_counter() - start:.0f} s; error {blueprint.provenance.calibration_error:.1%}")
    asyncio.run(compare_simulated(blueprint, task, grid))


if __name__ == "__main__":
    main()
