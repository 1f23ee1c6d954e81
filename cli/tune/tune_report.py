from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.report import report_content
from llmsched.cli.bench.report.report_content import ReportContent, Table
from llmsched.cli.chart import Chart, Series
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.tune.explanation import conclusion, gain
from llmsched.cli.tune.knobs import Setting, describe, knob_in_words, varied_knobs
from llmsched.cli.tune.preference import best_trial, relative_scores
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trials import Trial, figure_name
from llmsched.cli.tune.tune_json import as_json
from llmsched.cli.tune.tuning import TuneOutcome
from llmsched.engine.request_latency import DEFINITIONS
from llmsched.profiles.tuned import profile_dir

_BUDGET_AXIS = "max_num_batched_tokens, logarithmic"


def show(outcome: TuneOutcome, *, definitions: bool) -> None:
    report_content.show(_content(outcome), definitions=definitions)


def say_profile(outcome: TuneOutcome, profile: Path | None) -> None:
    """Print the path of the profile and the command that uses it, or else how to get a profile."""
    if profile is None and best_trial(outcome.history) is not None:
        render.say("no profile was written; to save these settings, run the command again with --output NAME")
    if profile is not None:
        named = profile.stem if profile.parent == profile_dir() else str(profile)
        render.say(f"profile: {profile} (use it with `llmsched serve --profile {named}`)")


def page(outcome: TuneOutcome, profile: Path | None) -> str:
    title = f"llmsched tune: {outcome.task.model}"
    return report_content.report_page(
        title, [_content(outcome)], as_json(outcome, profile), str(outcome.device.get("name", "unknown"))
    )


def _content(outcome: TuneOutcome) -> ReportContent:
    task, provenance, history = outcome.task, outcome.provenance, outcome.history
    trials, charts = history.trials(), _charts(history)
    settings = [trial.setting for trial in trials]
    reasons = [f"{describe(trial.setting, settings)}: {trial.reason}" for trial in trials if trial.reason is not None]
    return ReportContent(
        verdict=conclusion(outcome),
        summary=_summary(outcome),
        notes=[Experiment(task.model, provenance, task.load, task.slo).headline(), *provenance.caveats()],
        tables=[_table(outcome), *_rate_tables(outcome)],
        charts=charts,
        terminal_charts=len(charts),
        closing=reasons,
        definitions=_definitions(outcome),
        decisions=outcome.notes,
        warnings=outcome.warnings,
    )


def _summary(outcome: TuneOutcome) -> list[tuple[str, str]]:
    if (best := best_trial(outcome.history)) is None:
        return []
    over, knee = gain(outcome), outcome.rates.best.met
    return [
        *((knob, knob_in_words(knob, getattr(best.setting, knob))) for knob in outcome.task.knobs),
        *([] if knee is None else [("knee", f"{knee:.3g} requests/s")]),
        *([] if over is None else [("gain over the default", f"{over:+.0%}")]),
        ("P99 TTFT", f"{_cell(best.p99['ttft'], 1e3)} ms"),
        ("output tokens/s", _cell(best.output_tokens_per_s, 1)),
    ]


def _definitions(outcome: TuneOutcome) -> dict[str, str]:
    names = ("TTFT", "ITL", "TPOT", *(["goodput"] if outcome.task.slo.given() else []), "percentiles", "steady")
    goal = outcome.history.goal
    of = "the best setting's" if best_trial(outcome.history) else "the highest"
    share = f"{goal} relative to {of}; only runs of the same rounds are compared"
    return {**{name: DEFINITIONS[name] for name in names}, f"{goal} %": share}


def _table(outcome: TuneOutcome) -> Table:
    history, compared = outcome.history, outcome.rates.compared
    trials, best = history.trials(), best_trial(history)
    knobs = varied_knobs([trial.setting for trial in trials])
    relative, latencies = relative_scores(history), ["P99 TTFT ms", "P99 ITL ms", "P99 TPOT ms"]
    columns = ["", *knobs, "runs", "requests", "tokens/s", "good req/s", f"{history.goal} %", *latencies]
    rows = [
        [
            _mark(trial, best, history.default),
            *(knob_in_words(knob, getattr(trial.setting, knob)) for knob in knobs),
            str(trial.rounds),
            str(trial.completed + trial.failed),
            _cell(trial.output_tokens_per_s, 1),
            _cell(trial.goodput_rps, 1, digits=3),
            _cell(relative.get(trial.setting), 100),
            *(_cell(trial.p99[name], 1e3) for name in ("ttft", "itl", "tpot")),
        ]
        for trial in trials
    ]
    at = "" if compared is None else f" at {compared:.3g} requests/s, the default's knee"
    spare = ("P99 TTFT ms", "P99 ITL ms", "tokens/s", "P99 TPOT ms", "requests", "runs")
    return Table(f"settings{at}", columns, rows, spare=spare)


def _mark(trial: Trial, best: Trial | None, default: Setting) -> str:
    is_best = best is not None and trial.setting == best.setting
    state = "misses SLO" if trial.miss > 1 else "fails"
    if trial.skipped or trial.feasible:
        state = "skipped" if trial.skipped else ""
    words = ("best" if is_best else "", "default" if trial.setting == default else "", "" if is_best else state)
    return ", ".join(filter(None, words))


def _cell(value: float | None, factor: float, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value * factor:.{digits}f}"


def _rate_tables(outcome: TuneOutcome) -> list[Table]:
    slo, best, rows = outcome.task.slo, best_trial(outcome.history), outcome.rates.rows
    if best is None or not rows:
        return []
    names = [f"{figure_name(name, slo)} ms" for name in slo.given()]
    figures = ["good req/s", "met by", *names] if names else ["tokens/s", "P99 TTFT ms"]

    def cells(trial: Trial) -> list[str]:
        if not names:
            return [_cell(trial.output_tokens_per_s, 1), _cell(trial.p99["ttft"], 1e3)]
        met = trial.attainment.get("all")
        held = [_cell(trial.held.get(name), 1e3) for name in slo.given()]
        return [_cell(trial.goodput_rps, 1, digits=3), "n/a" if met is None else f"{met:.0%}", *held]

    who, columns = "the default", [f"default {figure}" for figure in figures]
    if best.setting != outcome.history.default:
        who, columns = "the default and the best setting", [*columns, *(f"best {figure}" for figure in figures)]
    labels = [row.label + (" (predicted)" if row.predicted else "") for row in rows]
    table = [
        [label, _cell(row.rate, 1, digits=3), *cells(row.default), *cells(row.best)][: 2 + len(columns)]
        for label, row in zip(labels, rows, strict=True)
    ]
    return [Table(f"{who} by request rate", ["", "requests/s", *columns], table)]


def _charts(history: TrialHistory) -> list[Chart]:
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in history.trials():
        if trial.completed:
            groups.setdefault(astuple(trial.setting)[1:], []).append(trial)
    # The largest group of measured trials that differ only in the token budget.
    largest: list[Trial] = max(groups.values(), key=len, default=[])
    trials = sorted(largest, key=lambda trial: trial.setting.max_num_batched_tokens)
    if len(trials) < 2:
        return []

    def series(label: str, values: Sequence[float | None]) -> Series:
        budgets = [trial.setting.max_num_batched_tokens for trial in trials]
        known = [(budget, value) for budget, value in zip(budgets, values, strict=True) if value is not None]
        return Series(label, known, "dots")

    limits, charts = history.slo.given(), []
    for name in ("itl", "ttft"):
        label = figure_name(name, history.slo)
        seconds = [trial.held.get(name, trial.p99[name]) for trial in trials]
        drawn = series(label, [None if value is None else 1e3 * value for value in seconds])
        limit = ((f"SLO of {label}", 1e3 * limits[name]),) if name in limits else ()
        charts.append(Chart(f"{label} by token budget", _BUDGET_AXIS, "ms", (drawn,), log_x=True, limits=limit))
    relative = relative_scores(history)
    shares = [100 * relative[trial.setting] if trial.setting in relative else None for trial in trials]
    missed = [None if trial.feasible else share for trial, share in zip(trials, shares, strict=True)]
    both = (series(history.goal, shares), *([series("not feasible", missed)] if any(missed) else []))
    unit = "% of the best setting" if best_trial(history) else "% of the highest"
    return [*charts, Chart(f"{history.goal} by token budget", _BUDGET_AXIS, unit, both, log_x=True)]
