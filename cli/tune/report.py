"""What a search found: as a table, as JSON, and as a profile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.output.tables import Table
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.html_page import Page
from llmsched.cli.tune.charts import curve
from llmsched.cli.tune.job import Outcome
from llmsched.cli.tune.knobs import KNOBS, knob_in_words
from llmsched.cli.tune.subject import versions_table
from llmsched.cli.tune.trials import Trial, TrialHistory, explain
from llmsched.engine.latency import DEFINITIONS, Slo
from llmsched.profiles.toml_files import Scalar
from llmsched.profiles.tuned import TunedProfile, profile_dir


def as_json(outcome: Outcome, profile: Path | None) -> dict[str, Any]:
    """The search for scripts. Times are in milliseconds; null is what a trial could not tell."""
    history, task = outcome.history, outcome.task
    best, nearest = history.best(), history.nearest_miss()
    return {
        **{name: value for name, value in outcome.subject.provenance.as_json().items() if name != "where"},
        "model": outcome.subject.name,
        "device": dict(outcome.subject.device),
        "best": None if best is None else asdict(best.setting),
        "nearest_miss": None if best is not None or nearest is None else _trial_json(nearest),
        "explanation": explain(history),
        "maximize": history.goal,
        "knobs": list(task.knobs),
        "trials": _trials(history),
        "notes": list(outcome.notes),
        "runs": sum(run.requests > 0 for runs in history.runs.values() for run in runs),
        "duration_s": outcome.seconds,
        "profile": None if profile is None else str(profile),
        "slo": _slo_table(task.slo),
        "workload": task.load.parameters(),
        "definitions": {**DEFINITIONS, "goodput_rps": "goodput at the steady rate, so without ramp and drain"},
    }


def show(outcome: Outcome, profile: Path | None) -> None:
    """Print the curve, the choice and where the profile is."""
    for line in _origin(outcome):
        render.say(line)
    table = _table(outcome.history)
    render.table(table.title, table.columns, table.rows)
    for chart in curve(outcome.history):
        render.chart(chart)
    for sentence in (*_reasons(outcome.history), explain(outcome.history)):
        render.say(sentence)
    for name, meaning in _definitions(outcome).items():
        render.say(f"{name}: {meaning}")
    for note in outcome.notes:
        render.note(note)
    if profile is not None:
        render.say(f"profile: {profile} (use it with `llmsched serve --profile {_profile_word(profile)}`)")


def page(outcome: Outcome, profile: Path | None) -> str:
    """The HTML of the search: what was chosen and why, the curve, every setting."""
    made = Page(f"llmsched tune: {outcome.subject.name}")
    for line in _origin(outcome):
        made.say(line)
    made.heading("choice")
    made.say(explain(outcome.history))
    for note in outcome.notes:
        made.warn(note)
    made.heading("curve")
    for chart in curve(outcome.history):
        made.chart(chart)
    made.heading("settings")
    made.table(*_table(outcome.history)[1:])
    for sentence in _reasons(outcome.history):
        made.say(sentence)
    made.heading("definitions")
    made.terms(_definitions(outcome))
    made.heading("report")
    made.code(json.dumps(as_json(outcome, profile), indent=1, allow_nan=False))
    return made.html()


def _origin(outcome: Outcome) -> list[str]:
    """Where the figures come from."""
    subject, load = outcome.subject, outcome.task.load
    origin = Experiment(subject.name, subject.provenance, load, outcome.task.slo)
    return [origin.headline(), *subject.provenance.caveats()]


def _reasons(history: TrialHistory) -> list[str]:
    """Why settings are not feasible, or were not measured."""
    trials = history.trials()
    return [f"{_name(trial, trials)}: {trial.reason}" for trial in trials if trial.reason is not None]


def _definitions(outcome: Outcome) -> dict[str, str]:
    names = ("TTFT", "ITL", "TPOT", *(["goodput"] if outcome.task.slo.given() else []), "percentiles", "steady")
    goal = outcome.history.goal
    of = "the best's" if outcome.history.best() else "the highest"
    share = f"{goal} as a share of {of}, in runs of the same round: other rates are of longer and shorter runs"
    return {**{name: DEFINITIONS[name] for name in names}, f"{goal} %": share}


def _table(history: TrialHistory) -> Table:
    """A row per setting."""
    trials, best = history.trials(), history.best()
    knobs = _varied(trials)
    relative, latencies = history.relative(), ["P99 TTFT ms", "P99 ITL ms", "P99 TPOT ms"]
    columns = ["", *knobs, "runs", "requests", "tokens/s", "good req/s", f"{history.goal} %", *latencies]
    rows = [
        [
            _mark(trial, best),
            *(knob_in_words(knob, getattr(trial.setting, knob)) for knob in knobs),
            str(trial.rounds),
            str(trial.completed + trial.failed),
            _figure(trial.output_tokens_per_s, 1),
            _figure(trial.goodput_rps, 1, digits=3),
            _figure(relative.get(trial.setting), 100),
            *(_figure(summary.p99, 1e3) for summary in (trial.ttft, trial.itl, trial.tpot)),
        ]
        for trial in trials
    ]
    return Table("settings", columns, rows)


def _mark(trial: Trial, best: Trial | None) -> str:
    if best is not None and trial.setting == best.setting:
        return "best"
    return "skipped" if trial.skipped else "" if trial.feasible else "no"


def _varied(trials: Sequence[Trial]) -> list[str]:
    """The token budget, and the knobs of which more than one value was tried."""
    return [k for k in KNOBS if k == KNOBS[0] or len({getattr(trial.setting, k) for trial in trials}) > 1]


def _name(trial: Trial, trials: Sequence[Trial]) -> str:
    return ", ".join(f"{knob} {knob_in_words(knob, getattr(trial.setting, knob))}" for knob in _varied(trials))


def make_profile(outcome: Outcome, best: Trial, given: Mapping[str, Any]) -> TunedProfile:
    """The profile of the best trial. `given` are the engine flags of the search; they hold for the profile as well."""
    subject, task = outcome.subject, outcome.task
    settings = {name: value for name, value in given.items() if isinstance(value, Scalar)}
    settings = {name: value for name, value in settings.items() if name not in KNOBS}
    return TunedProfile(
        engine={**settings, **best.setting.known()},
        slo=_slo_table(task.slo),
        workload={name: value for name, value in task.load.parameters().items() if isinstance(value, Scalar)},
        model=subject.model,
        device=subject.device,
        versions=versions_table(),
        memory=subject.memory,
        trials=tuple(
            {name: _readable(value) for name, value in trial.items() if isinstance(value, Scalar)}
            for trial in _trials(outcome.history)
        ),
        reason=explain(outcome.history),
        measured=subject.provenance.measured,
    )


def _trials(history: TrialHistory) -> list[dict[str, Any]]:
    """All trials for JSON, with their score as a share of the best's."""
    relative = history.relative()
    return [{**_trial_json(trial), "relative": relative.get(trial.setting)} for trial in history.trials()]


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        **asdict(trial.setting),
        "p99_itl_ms": _milliseconds(trial.itl.p99),
        "p99_ttft_ms": _milliseconds(trial.ttft.p99),
        "p99_tpot_ms": _milliseconds(trial.tpot.p99),
        "p99_e2e_ms": _milliseconds(trial.e2e.p99),
        "output_tokens_per_s": trial.output_tokens_per_s,
        "goodput_rps": trial.goodput_rps,
        "attainment": dict(trial.attainment) or None,
        "spread": trial.spread,
        "completed": trial.completed,
        "failed": trial.failed,
        "rounds": trial.rounds,
        "longest_run": trial.longest,
        "feasible": trial.feasible,
        "skipped": trial.skipped,
        "reason": trial.reason,
    }


def _slo_table(slo: Slo) -> dict[str, Scalar]:
    table: dict[str, Scalar] = {f"{name}_ms": limit * 1e3 for name, limit in slo.given().items()}
    return (
        {**table, "itl_statistic": slo.itl_statistic} if slo.itl is not None and slo.itl_statistic != "p99" else table
    )


def _readable(value: Scalar) -> Scalar:
    return round(value, 3) if isinstance(value, float) else value


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _figure(value: float | None, factor: float, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value * factor:.{digits}f}"


def _profile_word(path: Path) -> str:
    """What to give --profile: the name of a profile in the usual place, else its path."""
    return path.stem if path.parent == profile_dir() else str(path)
