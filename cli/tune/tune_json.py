from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmsched.cli.profiles.this_machine import versions_table
from llmsched.cli.tune.explanation import conclusion, gain
from llmsched.cli.tune.knees import RateReport
from llmsched.cli.tune.knobs import KNOBS
from llmsched.cli.tune.preference import best_trial, nearest_miss, relative_scores
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trials import Trial
from llmsched.cli.tune.tuning import TuneOutcome
from llmsched.engine.goodput import Slo
from llmsched.engine.request_latency import DEFINITIONS
from llmsched.profiles.toml_files import Scalar
from llmsched.profiles.tuned import TunedProfile

_RATE_KEYS = ("output_tokens_per_s", "requests_per_s", "goodput_rps")
_STATE_KEYS = ("spread", "completed", "failed", "rounds", "longest_run", "feasible", "skipped", "reason")
_TRIAL_KEYS = (*_RATE_KEYS, "attainment", *_STATE_KEYS)


def as_json(outcome: TuneOutcome, profile: Path | None) -> dict[str, Any]:
    history, task = outcome.history, outcome.task
    best, nearest = best_trial(history), nearest_miss(history)
    return {
        **{name: value for name, value in outcome.provenance.as_json().items() if name != "where"},
        "model": task.model,
        "device": dict(outcome.device),
        "best": None if best is None else asdict(best.setting),
        "nearest_miss": None if best is not None or nearest is None else _trial_json(nearest),
        "default": _trial_json(history.trial(history.default)),
        "gain": gain(outcome),
        "judged_by": "knee" if task.by_knee else "given",
        "rates": _rates_json(outcome.rates),
        "explanation": conclusion(outcome),
        "maximize": history.goal,
        "knobs": list(task.knobs),
        "trials": _trials_json(history),
        "notes": outcome.notes,
        "warnings": outcome.warnings,
        "runs": sum(run.requests > 0 for run in history.all_runs),
        "duration_s": outcome.seconds,
        "profile": None if profile is None else str(profile),
        "slo": _slo_table(task.slo),
        "workload": task.load.parameters(),
        "definitions": {
            **DEFINITIONS,
            "goodput_rps": "goodput at the steady-state rate (ramp-up and ramp-down excluded)",
        },
    }


def make_profile(outcome: TuneOutcome, best: Trial) -> TunedProfile:
    """Return a profile with the setting of the best trial and the engine flags of the search."""
    task, given = outcome.task, outcome.task.options.given
    fixed = {name: value for name, value in given.items() if isinstance(value, Scalar) and name not in KNOBS}
    rates = _rates_json(outcome.rates)
    knee = {"best_rps": rates["best_knee_rps"], "default_rps": rates["default_knee_rps"]}
    knee |= {"given_rps": rates["given_rps"], "gain": gain(outcome)}
    return TunedProfile(
        engine={name: value for name, value in (fixed | asdict(best.setting)).items() if value is not None},
        slo=_slo_table(task.slo),
        workload={name: value for name, value in task.load.parameters().items() if isinstance(value, Scalar)},
        model=outcome.model,
        device=outcome.device,
        versions=versions_table(),
        memory=outcome.memory,
        trials=tuple(
            {name: round(x, 3) if isinstance(x, float) else x for name, x in trial.items() if isinstance(x, Scalar)}
            for trial in _trials_json(outcome.history)
        ),
        knee={name: round(value, 3) for name, value in knee.items() if value is not None},
        reason=conclusion(outcome),
        measured=outcome.provenance.measured,
    )


def _trials_json(history: TrialHistory) -> list[dict[str, Any]]:
    relative = relative_scores(history)
    return [{**_trial_json(trial), "relative": relative.get(trial.setting)} for trial in history.trials()]


def _trial_json(trial: Trial) -> dict[str, Any]:
    p99s = {name: trial.p99[name] for name in ("itl", "ttft", "tpot", "e2e")}
    return {
        **asdict(trial.setting),
        **{f"p99_{name}_ms": None if seconds is None else seconds * 1e3 for name, seconds in p99s.items()},
        **{name: getattr(trial, name) for name in _TRIAL_KEYS},
        "attainment": dict(trial.attainment) or None,
    }


def _slo_table(slo: Slo) -> dict[str, Scalar]:
    table: dict[str, Scalar] = {f"{name}_ms": limit * 1e3 for name, limit in slo.given().items()}
    if slo.itl is not None and slo.itl_statistic != "p99":
        table["itl_statistic"] = slo.itl_statistic
    return table


def _rates_json(rates: RateReport) -> dict[str, Any]:
    given, knee = _finite(rates.given), rates.best.met
    return {
        "given_rps": given,
        "given_of_knee": given / knee if given and knee else None,
        "compared_at_rps": rates.compared,
        "default_knee_rps": rates.default.met,
        "default_missed_rps": rates.default.missed,
        "best_knee_rps": knee,
        "best_missed_rps": rates.best.missed,
        "load_too_light": rates.light,
        "rows": [
            {
                "label": row.label,
                "rate": _finite(row.rate),
                "predicted": row.predicted,
                "default": _trial_json(row.default),
                "best": _trial_json(row.best),
            }
            for row in rates.rows
        ],
    }


def _finite(rate: float | None) -> float | None:
    return None if rate is None or math.isinf(rate) else rate
