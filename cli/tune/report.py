"""What a sweep found: as a table, as JSON, and as a profile."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.load import Load
from llmsched.cli.tune.objective import Trial, choose, explain
from llmsched.engine.device import device_memory
from llmsched.engine.latency import DEFINITIONS, Slo
from llmsched.engine.model.info import ModelInfo
from llmsched.profiles.tuned import Scalar, TunedProfile, profile_dir


def as_json(model: str, trials: Sequence[Trial], workload: Load, slo: Slo, profile: Path | None) -> dict[str, Any]:
    """The sweep for scripts. Times are in milliseconds; null is what a trial could not tell."""
    best = choose(trials)
    return {
        "measured": True,
        "model": model,
        "best": None if best is None else asdict(best.setting),
        "explanation": explain(trials, slo),
        "trials": [_trial_json(trial) for trial in trials],
        "profile": None if profile is None else str(profile),
        "slo": _slo_table(slo),
        "workload": workload.parameters(),
        "definitions": dict(DEFINITIONS),
    }


def show(model: str, trials: Sequence[Trial], workload: Load, slo: Slo, profile: Path | None) -> None:
    """Print the curve, the choice and where the profile is."""
    best = choose(trials)
    render.say(
        f"MEASURED {model} (in process): {workload.describe_requests()} a round, "
        f"{workload.describe()}, seed {workload.seed}"
    )
    columns = ["", "max_num_batched_tokens", "rounds", "tokens/s", "P99 TTFT ms", "P99 ITL ms", "P99 TPOT ms"]
    rows = [
        [
            "best" if trial is best else "" if trial.feasible else "no",
            str(trial.setting.max_num_batched_tokens),
            str(trial.rounds),
            _figure(trial.output_tokens_per_s, 1),
            *(_figure(summary.p99, 1e3) for summary in (trial.ttft, trial.itl, trial.tpot)),
        ]
        for trial in trials
    ]
    render.table("", columns, rows)
    for trial in trials:
        if trial.reason is not None:
            render.say(f"{trial.setting.max_num_batched_tokens} is not feasible: {trial.reason}")
    render.say(explain(trials, slo))
    for name in ("TTFT", "ITL", "TPOT", "percentiles"):
        render.say(f"{name}: {DEFINITIONS[name]}")
    if profile is not None:
        render.say(f"profile: {profile} (use it with `llmsched serve --profile {_profile_word(profile)}`)")


def make_profile(
    model: ModelInfo,
    device: str,
    trials: Sequence[Trial],
    best: Trial,
    workload: Load,
    slo: Slo,
    given: Mapping[str, Any],
) -> TunedProfile:
    """The profile of the best trial. `given` are the engine flags of the sweep; they hold for the profile as well."""
    settings = {name: value for name, value in given.items() if isinstance(value, Scalar)}
    return TunedProfile(
        engine={**settings, **asdict(best.setting)},
        slo=_slo_table(slo),
        workload={name: value for name, value in workload.parameters().items() if value is not None},
        model={"name": model.name, "architecture": model.architecture},
        device={"kind": device, "name": device_memory(device).name, "cores": os.cpu_count() or 0},
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("llmsched", "torch", "transformers")},
        },
        trials=tuple(
            {name: _readable(value) for name, value in _trial_json(trial).items() if value is not None}
            for trial in trials
        ),
        reason=explain(trials, slo),
    )


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        **asdict(trial.setting),
        "p99_itl_ms": _milliseconds(trial.itl.p99),
        "p99_ttft_ms": _milliseconds(trial.ttft.p99),
        "p99_tpot_ms": _milliseconds(trial.tpot.p99),
        "p99_e2e_ms": _milliseconds(trial.e2e.p99),
        "output_tokens_per_s": trial.output_tokens_per_s,
        "spread": trial.spread,
        "completed": trial.completed,
        "failed": trial.failed,
        "rounds": trial.rounds,
        "feasible": trial.feasible,
        "reason": trial.reason,
    }


def _slo_table(slo: Slo) -> dict[str, Scalar]:
    return {f"{name}_ms": limit * 1e3 for name, limit in slo.given().items()}


def _readable(value: Scalar) -> Scalar:
    return round(value, 3) if isinstance(value, float) else value


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _figure(value: float | None, factor: float) -> str:
    return "n/a" if value is None else f"{value * factor:.1f}"


def _profile_word(path: Path) -> str:
    """What to give --profile: the name of a profile in the usual place, else its path."""
    return path.stem if path.parent == profile_dir() else str(path)
