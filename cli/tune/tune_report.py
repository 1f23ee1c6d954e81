"""Report of a search as terminal output, HTML page and JSON, and the tuned profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from llmsched.cli import render
from llmsched.cli.bench.report import report_content
from llmsched.cli.bench.report.report_content import ReportContent, Table
from llmsched.cli.chart import Chart, Series
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.profiles.apply import versions_table
from llmsched.cli.tune.knees import RateReport
from llmsched.cli.tune.knobs import KNOBS, Setting, describe, knob_in_words, varied_knobs
from llmsched.cli.tune.trials import Goal, Trial, TrialHistory, figure_name
from llmsched.cli.tune.tuning import TuneOutcome
from llmsched.engine.goodput import Slo
from llmsched.engine.latency_definitions import DEFINITIONS
from llmsched.profiles.toml_files import Scalar
from llmsched.profiles.tuned import TunedProfile, profile_dir

_BUDGET_AXIS = "max_num_batched_tokens, logarithmic"


def as_json(outcome: TuneOutcome, profile: Path | None) -> dict[str, Any]:
    """Return the report as a JSON object. The key names give the units. Unknown figures are null."""
    history, task = outcome.history, outcome.task
    best, nearest = history.best(), history.nearest_miss()
    return {
        **{name: value for name, value in outcome.provenance.as_json().items() if name != "where"},
        "model": task.model,
        "device": dict(outcome.device),
        "best": None if best is None else asdict(best.setting),
        "nearest_miss": None if best is not None or nearest is None else _trial_json(nearest),
        "default": None if history.default is None else _trial_json(history.trial(history.default)),
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


def show(outcome: TuneOutcome, *, definitions: bool) -> None:
    """Print the report, with the definitions of its figures if they are wanted."""
    report_content.show(_content(outcome), definitions=definitions)


def say_profile(outcome: TuneOutcome, profile: Path | None) -> None:
    """Print where the profile is and the command that uses it, or how to get one if none was written."""
    if profile is None and outcome.history.best() is not None:
        render.say("no profile was written; to save these settings, run the command again with --output NAME")
    if profile is not None:
        named = profile.stem if profile.parent == profile_dir() else str(profile)
        render.say(f"profile: {profile} (use it with `llmsched serve --profile {named}`)")


def page(outcome: TuneOutcome, profile: Path | None) -> str:
    """Return the report as an HTML page."""
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
    """Return the best setting, its knee and latency, and the gain over the default; empty if no setting was chosen."""
    if (best := outcome.history.best()) is None:
        return []
    over, knee = gain(outcome), outcome.rates.best.met
    return [
        *((knob, knob_in_words(knob, getattr(best.setting, knob))) for knob in outcome.task.knobs),
        *([] if knee is None else [("knee", f"{knee:.3g} requests/s")]),
        *([] if over is None else [("gain over the default", f"{over:+.0%}")]),
        ("P99 TTFT", f"{_cell(best.latencies['ttft'].p99, 1e3)} ms"),
        ("output tokens/s", _cell(best.output_tokens_per_s, 1)),
    ]


def make_profile(outcome: TuneOutcome, best: Trial) -> TunedProfile:
    """Return the profile of the best trial: the engine flags of the search and the best setting."""
    task, given = outcome.task, outcome.task.options.given
    fixed = {name: value for name, value in given.items() if isinstance(value, Scalar) and name not in KNOBS}
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
        knee=_knee_table(outcome),
        reason=conclusion(outcome),
        measured=outcome.provenance.measured,
    )


def _trials_json(history: TrialHistory) -> list[dict[str, Any]]:
    """Return all trials as JSON objects. `relative` is a trial's score divided by the best trial's score."""
    relative = history.relative()
    return [{**_trial_json(trial), "relative": relative.get(trial.setting)} for trial in history.trials()]


def _trial_json(trial: Trial) -> dict[str, Any]:
    p99s = {name: trial.latencies[name].p99 for name in ("itl", "ttft", "tpot", "e2e")}
    return {
        **asdict(trial.setting),
        **{f"p99_{name}_ms": None if seconds is None else seconds * 1e3 for name, seconds in p99s.items()},
        "output_tokens_per_s": trial.output_tokens_per_s,
        "requests_per_s": trial.requests_per_s,
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
    if slo.itl is not None and slo.itl_statistic != "p99":
        table["itl_statistic"] = slo.itl_statistic
    return table


def _definitions(outcome: TuneOutcome) -> dict[str, str]:
    names = ("TTFT", "ITL", "TPOT", *(["goodput"] if outcome.task.slo.given() else []), "percentiles", "steady")
    goal = outcome.history.goal
    of = "the best setting's" if outcome.history.best() else "the highest"
    share = f"{goal} relative to {of}; only runs of the same rounds are compared"
    return {**{name: DEFINITIONS[name] for name in names}, f"{goal} %": share}


def _table(outcome: TuneOutcome) -> Table:
    history, compared = outcome.history, outcome.rates.compared
    trials, best = history.trials(), history.best()
    knobs = varied_knobs([trial.setting for trial in trials])
    relative, latencies = history.relative(), ["P99 TTFT ms", "P99 ITL ms", "P99 TPOT ms"]
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
            *(_cell(trial.latencies[name].p99, 1e3) for name in ("ttft", "itl", "tpot")),
        ]
        for trial in trials
    ]
    at = "" if compared is None else f" at {compared:.3g} requests/s, the default's knee"
    spare = ("P99 TTFT ms", "P99 ITL ms", "tokens/s", "P99 TPOT ms", "requests", "runs")
    return Table(f"settings{at}", columns, rows, spare=spare)


def _mark(trial: Trial, best: Trial | None, default: Setting | None) -> str:
    is_best = best is not None and trial.setting == best.setting
    state = "" if is_best else _state(trial)
    return ", ".join(filter(None, ("best" if is_best else "", "default" if trial.setting == default else "", state)))


def _state(trial: Trial) -> str:
    if trial.skipped or trial.feasible:
        return "skipped" if trial.skipped else ""
    return "misses SLO" if trial.miss > 1 else "fails"


def _cell(value: float | None, factor: float, digits: int = 1) -> str:
    return "n/a" if value is None else f"{value * factor:.{digits}f}"


# -- request rates -----------------------------------------------------------------------------------------------


def _rate_tables(outcome: TuneOutcome) -> list[Table]:
    """Return the table of the default against the best setting by request rate, if they were compared."""
    history, best, slo = outcome.history, outcome.history.best(), outcome.task.slo
    if best is None or not outcome.rates.rows:
        return []
    same = best.setting == history.default
    names = list(slo.given()) or ["ttft"]
    figures = ["good req/s", "met by", *(figure_name(name, slo) + " ms" for name in names)] if slo.given() else []
    figures = figures or ["tokens/s", "P99 TTFT ms"]
    columns = ["", "requests/s", *(f"default {f}" for f in figures), *([] if same else [f"best {f}" for f in figures])]
    rows = []
    for row in outcome.rates.rows:
        cells = [row.label + (" (predicted)" if row.predicted else ""), _cell(row.rate, 1, digits=3)]
        for trial in [row.default] if same else [row.default, row.best]:
            if slo.given():
                met = trial.attainment.get("all")
                cells += [_cell(trial.goodput_rps, 1, digits=3), "n/a" if met is None else f"{met:.0%}"]
            else:
                cells.append(_cell(trial.output_tokens_per_s, 1))
            cells += [_cell(trial.held.get(name, trial.latencies[name].p99), 1e3) for name in names]
        rows.append(cells)
    who = "the default" if same else "the default and the best setting"
    return [Table(f"{who} by request rate", columns, rows)]


def _rates_json(rates: RateReport) -> dict[str, Any]:
    given = rates.given if rates.given is None or math.isfinite(rates.given) else None
    knee = rates.best.met
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
                "rate": row.rate if row.rate is not None and math.isfinite(row.rate) else None,
                "predicted": row.predicted,
                "default": _trial_json(row.default),
                "best": _trial_json(row.best),
            }
            for row in rates.rows
        ],
    }


def _knee_table(outcome: TuneOutcome) -> dict[str, Scalar]:
    """Return the table [knee] of a profile, in requests per second; `gain` is the gain over the default."""
    rates = _rates_json(outcome.rates)
    known = {"best_rps": rates["best_knee_rps"], "default_rps": rates["default_knee_rps"]}
    known |= {"given_rps": rates["given_rps"], "gain": gain(outcome)}
    return {name: round(value, 3) for name, value in known.items() if value is not None}


# -- the curve over token budgets --------------------------------------------------------------------------------


def _charts(history: TrialHistory) -> list[Chart]:
    """Return charts of ITL, TTFT and the goal over the token budget; empty if fewer than two budgets were measured."""
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in history.trials():
        if trial.completed:
            groups.setdefault(astuple(trial.setting)[1:], []).append(trial)
    # The largest group of measured trials that differ only in the token budget.
    largest: list[Trial] = max(groups.values(), key=len, default=[])
    trials = sorted(largest, key=_budget)
    if len(trials) < 2:
        return []
    limits, charts = history.slo.given(), []
    for name in ("itl", "ttft"):
        label = figure_name(name, history.slo)
        figures = [(trial, trial.held.get(name, trial.latencies[name].p99)) for trial in trials]
        points = [(_budget(trial), 1e3 * figure) for trial, figure in figures if figure is not None]
        limit = ((f"SLO of {label}", 1e3 * limits[name]),) if name in limits else ()
        title, series = f"{label} by token budget", (Series(label, points, "dots"),)
        charts.append(Chart(title, _BUDGET_AXIS, "ms", series, log_x=True, limits=limit))
    relative = history.relative()
    shares = [(trial, 100 * relative[trial.setting]) for trial in trials if trial.setting in relative]
    missed = [(_budget(trial), share) for trial, share in shares if not trial.feasible]
    drawn = [Series(history.goal, [(_budget(trial), share) for trial, share in shares], "dots")]
    drawn += [Series("not feasible", missed, "dots")] if missed else []
    unit = "% of the best setting" if history.best() else "% of the highest"
    charts.append(Chart(f"{history.goal} by token budget", _BUDGET_AXIS, unit, tuple(drawn), log_x=True))
    return charts


def _budget(trial: Trial) -> float:
    return float(trial.setting.max_num_batched_tokens)


# -- the choice in words -----------------------------------------------------------------------------------------


def gain(outcome: TuneOutcome) -> float | None:
    """Return the gain of the best setting over the default as a share: of the knee or, without knees, of the score."""
    history, rates, best = outcome.history, outcome.rates, outcome.history.best()
    if best is None or history.default is None:
        return None
    if best.setting == history.default:
        return 0.0
    if rates.best.met and rates.default.met:
        return rates.best.met / rates.default.met - 1
    share = history.relative().get(history.default)
    return 1 / share - 1 if share else None


def conclusion(outcome: TuneOutcome) -> str:
    """Return sentences that explain the choice, name the gain over the default, and place the given load."""
    history, rates, best = outcome.history, outcome.rates, outcome.history.best()
    default = history.default
    if best is None or default is None:
        return explain(history)
    over = gain(outcome)
    settings = [trial.setting for trial in history.trials() if not trial.skipped]
    chosen, usual = describe(best.setting, settings), describe(default, settings)
    if (knee := rates.best.met) is None:
        tail = "it is the default" if best.setting == default else f"the default is {usual}"
        more = "" if best.setting == default or over is None else f", {over:+.0%} {history.goal} over it"
        return f"{explain(history)}; {tail}{more}"
    most = f"up to {'at least ' if rates.best.missed is None else ''}{knee:.3g} requests/s"
    if best.setting == default:
        none = "no other setting is better" if len(settings) > 1 else "no other setting was measured in time"
        found = f"the default stays: {usual} meets the SLOs {most}, and {none}"
    elif rates.default.met is None:
        found = f"{chosen} meets the SLOs {most}; the default ({usual}) misses them under the given load"
    elif over is not None and over > 0:
        found = f"{chosen} meets the SLOs {most}, {over:.0%} more than the default ({usual}: {rates.default.met:.3g})"
    else:
        found = f"{chosen} meets the SLOs {most}, as the default ({usual}) does, with more margin"
    if rates.given is None:
        return found
    if math.isinf(rates.given):
        return f"{found}; the given load sends all requests at once, past the knee"
    return f"{found}; the given load, {rates.given:.3g} requests/s, is {rates.given / knee:.0%} of that"


def explain(history: TrialHistory) -> str:
    """Return a sentence that explains why the best setting was chosen, or why no setting was chosen."""
    trials, best = [trial for trial in history.trials() if not trial.skipped], history.best()
    settings = [trial.setting for trial in trials]
    if not trials:
        return "the time limit ended the first run, so nothing was measured; set a longer --time-limit"
    if best is None:
        alone, none = len(trials) == 1, f"none of the {len(trials)} settings"
        if (nearest := history.nearest_miss()) is None:
            return "the only setting tried does not work; see its reason" if alone else f"{none} works; see the reasons"
        name = describe(nearest.setting, settings)
        missed = f"the only setting tried, {name}, misses an SLO"
        nothing = missed if alone else f"{none} meets the SLOs; the nearest is {name}"
        return f"{nothing}: {nearest.reason}; relax the SLOs or lower the load"
    good = [trial for trial in trials if trial.feasible]
    chosen = f"{describe(best.setting, settings)}: {rate_in_words(best, history.goal)}"
    if len(good) == 1:
        met = "meets the SLOs" if history.slo.given() else "works (no SLO was given)"
        tried = f"it is the only one of {len(trials)} settings that" if len(trials) > 1 else "the only setting tried"
        return f"{chosen}; {tried} {met}{_faster(best, history, settings)}"
    met = "meet the SLOs" if history.slo.given() else "work (no SLO was given)"
    rank = f"{_rank(best, good, history, settings)}; {len(good)} of {len(trials)} settings {met}"
    return f"{chosen} {rank}{_faster(best, history, settings)}"


def rate_in_words(trial: Trial, goal: Goal) -> str:
    """Return the rate that the search maximises, taken from a trial, as text with its unit."""
    tokens = f"{trial.output_tokens_per_s or 0.0:.1f} tokens/s"
    return f"{trial.goodput_rps or 0.0:.3g} good requests/s ({tokens})" if goal == "goodput" else tokens


def _rank(best: Trial, good: Sequence[Trial], history: TrialHistory, settings: Sequence[Setting]) -> str:
    table = history.ranking()
    rivals = [trial.setting for trial in good if trial.longest == best.longest]
    ahead = max(rivals, key=lambda setting: table.share(setting, best.setting))
    if ahead != best.setting:
        noise = f"{table.noise(ahead, best.setting):.0%}"
        within = f"within {noise}" if history.exact else f"within the noise ({noise})"
        return f"is {within} of the highest ({describe(ahead, settings)})"
    if any(table.share(trial.setting, best.setting) > 1 for trial in good):
        return f"is the highest of the {len(rivals)} settings that had full runs"
    return "is the highest"


def _faster(best: Trial, history: TrialHistory, settings: Sequence[Setting]) -> str:
    """Return a remark if a setting that missed an SLO is faster than the best setting, else ""."""
    table, late = history.throughput_ranking(), history.missed()
    shares = {trial.setting: table.share(trial.setting, best.setting) for trial in late}
    fastest = max(late, key=lambda trial: shares[trial.setting], default=None)
    if fastest is None or shares[fastest.setting] <= 1 + table.noise(fastest.setting, best.setting):
        return ""
    more = f"{shares[fastest.setting] - 1:.0%} more tokens/s"
    return f"; {describe(fastest.setting, settings)} gave {more}, but its {fastest.reason}"
