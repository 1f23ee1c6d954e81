"""The default against tune's choice at 0.5, 0.8, 1.0 and 1.2 of the choice's knee.

Simulated on three models with three workloads each; then a profile that was tuned at 8 requests/s with short prompts
serves 12 requests/s with long ones. With --measured, the demo on this machine instead. Each row has the goodput and P99
TTFT of both settings under the same requests; `ratio` is the goodput of the choice over the default's.

python tests/bench/bench_tune_choice.py [--measured] [--time-limit SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from llmsched.cli.figures.measure import Measurement, measure
from llmsched.cli.load.load import Load
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.options.config_flags import EngineOptions
from llmsched.cli.targets.engine_target import open_engine
from llmsched.cli.targets.interface import RunPlan
from llmsched.cli.targets.simulated_target import make_blueprint, simulate_run
from llmsched.cli.tune.explanation import conclusion
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.preference import best_trial
from llmsched.cli.tune.rate_search import MULTIPLES
from llmsched.cli.tune.tune_json import make_profile
from llmsched.cli.tune.tuning import TuneOutcome, TuneTask, tune_engine, tune_simulated
from llmsched.engine.config import EngineConfig
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
MODELS = (
    ("Qwen--Qwen3-8B", "h100"),
    ("Qwen--Qwen2.5-7B-Instruct", "l40s"),
    ("meta-llama--Meta-Llama-3.1-8B", "a100-80gb"),
)
WORKLOADS = (
    ("chat", SyntheticLoad(num_prompts=50, input_len=500, output_len=40, request_rate=2), Slo(ttft=0.5, itl=0.06)),
    ("code", SyntheticLoad(num_prompts=40, input_len=2000, output_len=10, request_rate=1), Slo(ttft=0.6)),
    ("summary", SyntheticLoad(num_prompts=30, input_len=4000, output_len=30, request_rate=0.5), Slo(ttft=1.5, e2e=4.0)),
)


def task(model: str, load: Load, slo: Slo, time_limit: float, rounds: int = 1) -> TuneTask:
    return TuneTask(
        model=model,
        options=EngineOptions({}),
        load=load,
        slo=slo,
        goal="goodput",
        knobs=("max_num_batched_tokens", "target_itl"),
        timeout=600.0,
        rounds=rounds,
        time_limit=time_limit,
        smallest_budget=32,
        destination=Path(tempfile.mkdtemp()) / "tuned.toml",
        warm_start=False,
    )


def say_row(cells: Sequence[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def header() -> None:
    columns = ("load", "default", "choice", "x knee", "requests/s", "default good/s", "choice good/s", "ratio")
    say_row((*columns, "default P99 TTFT ms", "choice P99 TTFT ms"))
    say_row(["---"] * (len(columns) + 2))


def words(setting: Setting) -> str:
    target = "" if setting.target_itl is None else f", target_itl {setting.target_itl * 1e3:g} ms"
    return f"{setting.max_num_batched_tokens} tokens, {setting.max_num_seqs} seqs{target}"


def compare(name: str, settings: Sequence[Setting], share: str, load: Load, figures: Sequence[Measurement]) -> float:
    """Print a row, and return the ratio of the goodputs."""
    good = [0.0 if one.goodput is None else one.goodput.requests_per_s for one in figures]
    ratio = good[1] / good[0] if good[0] else float("inf")
    rates = (share, f"{load.asked_rate or 0:.3g}", *(f"{one:.2f}" for one in good), f"{ratio:.2f}")
    ttfts = (f"{1e3 * (one.latency.ttft.p99 or 0):.0f}" for one in figures)
    say_row((name, *map(words, settings), *rates, *ttfts))
    return ratio


def simulated(name: str, model: str, gpu: str, outcome: TuneOutcome, loads: Sequence[tuple[str, Load]]) -> list[float]:
    best, default = best_trial(outcome.history), outcome.history.default
    if best is None or default is None:
        print(f"{name}: {conclusion(outcome)}")
        return []
    settings, slo = (default, best.setting), outcome.task.slo
    largest = max(setting.max_num_batched_tokens for setting in settings)
    blueprint = make_blueprint(EngineConfig(model, max_num_batched_tokens=largest), gpu)
    ratios = []
    for share, load in loads:
        runs = [simulate_run(blueprint, load, timeout=600.0, **asdict(setting)) for setting in settings]
        ratios.append(compare(name, settings, share, load, [measure(run, load, slo) for run in runs]))
    return ratios


def all_simulated(time_limit: float) -> None:
    print("SIMULATED\n")
    header()
    told, worst = [], float("inf")
    for model, gpu in MODELS:
        path = str(CONFIGS / f"{model}_config.json")
        for workload, load, slo in WORKLOADS:
            name = f"{model.split('--')[1]} on {gpu}, {workload}"
            outcome = asyncio.run(tune_simulated(task(path, load, slo, time_limit), gpu, silent))
            told.append(f"{name}: {conclusion(outcome)}")
            knee = outcome.rates.best.met or load.asked_rate or 1.0
            ratios = simulated(
                name, path, gpu, outcome, [(f"{share}", load.at_rate(share * knee)) for share in MULTIPLES["knee"]]
            )
            worst = min([worst, *ratios[:3]])
    model, gpu = MODELS[0]
    path = str(CONFIGS / f"{model}_config.json")
    tuned = SyntheticLoad(num_prompts=100, input_len=128, output_len=32, request_rate=8)
    served = SyntheticLoad(num_prompts=100, input_len=1000, output_len=100, request_rate=12)
    outcome = asyncio.run(tune_simulated(task(path, tuned, Slo(ttft=0.8), time_limit), gpu, silent))
    told.append(f"tuned at 8/s: {conclusion(outcome)}")
    simulated("tuned at 8/s, 128 in, 32 out; served 12/s, 1000 in, 100 out", path, gpu, outcome, [("-", served)])
    print(f"\nworst ratio up to the knee: {worst:.2f} (wanted: 0.95 or more)\n")
    for sentence in told:
        print(f"- {sentence}")


async def served(config: EngineConfig, load: Load, slo: Slo) -> Measurement:
    async with open_engine(config, RunPlan(load, slo, 600.0, None), silent) as opened:
        return await opened.measure(load, slo, silent)


def all_measured(time_limit: float) -> None:
    load, slo = SyntheticLoad(num_prompts=32, input_len=128, output_len=32, max_concurrency=4), Slo(ttft=2.0)
    outcome = asyncio.run(tune_engine(task("demo", load, slo, time_limit, rounds=3), silent))
    print(f"MEASURED\n\n{conclusion(outcome)}\n")
    for note in (*outcome.notes, *outcome.warnings):
        print(f"- {note}")
    best, default = best_trial(outcome.history), outcome.history.default
    if best is None or default is None:
        return
    knee = outcome.rates.best.met or outcome.rates.given or 1.0
    settings = (default, best.setting)
    print(f"\nprofile: {dict(make_profile(outcome, best).engine)}\n")
    header()
    for share in MULTIPLES["knee"]:
        open_load = SyntheticLoad(num_prompts=32, input_len=128, output_len=32, request_rate=share * knee)
        figures = [asyncio.run(served(EngineConfig("demo", **asdict(setting)), open_load, slo)) for setting in settings]
        compare("demo", settings, f"{share}", open_load, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of each search")
    options = parser.parse_args()
    (all_measured if options.measured else all_simulated)(options.time_limit)


if __name__ == "__main__":
    main()
