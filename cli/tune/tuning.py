"""Tuning job: build an engine or a simulation, search its settings and collect the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from llmsched.cli import render
from llmsched.cli.figures.client_lag import BUSY
from llmsched.cli.load.load import Load
from llmsched.cli.options.config_flags import EngineOptions
from llmsched.cli.options.flags import flag
from llmsched.cli.profiles.apply import profile_settings
from llmsched.cli.profiles.this_machine import device_table
from llmsched.cli.targets.simulated_target import TextEncode, make_blueprint
from llmsched.cli.tune.knees import MEASURED_TOLERANCE, SIMULATED_TOLERANCE, KneeFinder, RateReport, scalable
from llmsched.cli.tune.knob_search import SearchSpace
from llmsched.cli.tune.knobs import KNOBS, Setting, largest_budget, powers_of_two
from llmsched.cli.tune.race import Race, rung_lengths
from llmsched.cli.tune.rate_search import JudgedBy, RateSearch
from llmsched.cli.tune.resume import ResumableRunner, state_path
from llmsched.cli.tune.runners import EngineRunner, SimulatedRunner, TrialLoad
from llmsched.cli.tune.time_limit import OutOfTimeError
from llmsched.cli.tune.trial_history import TrialHistory
from llmsched.cli.tune.trial_runs import Goal
from llmsched.engine.blueprint import Blueprint
from llmsched.engine.config import DEFAULT_TOKEN_BUDGET, EngineConfig, ResolvedConfig
from llmsched.engine.device import device_memory
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.plan import ratios
from llmsched.engine.memory.planner import model_name, open_planner
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance
from llmsched.profiles.calibrated import LOCAL
from llmsched.profiles.toml_files import Scalar
from llmsched.profiles.tuned_match import latest_profile

#: Numbers of full runs that a search needs: usually _FULL_RUNS, but _ALL_RUNS for a simulation without short runs.
_FULL_RUNS, _ALL_RUNS = 10, 25

#: Seconds that a simulated run at a request rate may last on its virtual clock. A measured one may last the time limit
#: divided by the number of such runs that a search needs.
_LONGEST_SIMULATED, _RUNS_AT_RATES = 30.0, 12
#: A run is disturbed if other processes used more than this share of the machine's CPU time.
_BUSY_SHARE = 0.15
#: Smallest max_queue_size of the engine, because a search may send more requests than the given load has.
_QUEUE = 100_000

Target = TypeVar("Target")


@dataclass(frozen=True, slots=True)
class TuneTask:
    """Model, load and SLOs of one `llmsched tune` command, and the limits of its search."""

    model: str
    options: EngineOptions
    load: Load
    slo: Slo
    goal: Goal
    knobs: tuple[str, ...]
    timeout: float  # seconds per request
    rounds: int  # most full runs of each of the best settings
    time_limit: float  # seconds of the whole search
    smallest_budget: int
    destination: Path  # of the profile; the search journal lies beside it
    judged_by: JudgedBy = "knee"
    resume: bool = False  # continue from the search journal
    warm_start: bool = True  # start from the latest profile of the same model and device

    @property
    def by_knee(self) -> bool:
        """True if settings are judged by their knees, which needs SLOs and a load that can be sent at any rate."""
        return self.judged_by == "knee" and bool(self.slo.given()) and scalable(self.load)


@dataclass(slots=True)
class TuneOutcome:
    task: TuneTask
    model: Mapping[str, str]  # the table [model] of the profile
    device: Mapping[str, Scalar]  # the table [device] of the profile
    provenance: Provenance
    history: TrialHistory
    memory: Mapping[str, Scalar] = field(default_factory=dict)  # ratios of actual to predicted bytes
    rates: RateReport = field(default_factory=RateReport)
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0  # duration of the search


async def tune_engine(task: TuneTask, progress: Progress) -> TuneOutcome:
    """Search for the best setting on an engine in this process.

    Raises ModelError if the model cannot be loaded, ConfigError if even the smallest token budget does not fit into
    memory, and LlmschedError if the journal cannot be used.
    """
    _warn_of_long_load(task)

    async def start(config: EngineConfig) -> EngineRunner:
        runner = EngineRunner(config, TrialLoad(task.load, task.slo, task.timeout), progress)
        await runner.engine()
        return runner

    runner, refused = await _open_largest(task, device_memory(task.options.given.get("device", "auto")).kind, start)
    try:
        engine = (await runner.engine()).core
        outcome = TuneOutcome(
            task,
            _model_table(task.model, progress),
            device_table(engine.config.device),
            Provenance("in process"),
            TrialHistory(task.slo, task.goal, _default(task, engine.config)),
            {} if engine.plan is None else ratios(engine.plan),
        )
        await _search(outcome, engine.config, refused, runner, progress)
    finally:
        await runner.close()
    return outcome


async def tune_simulated(task: TuneTask, device: str, progress: Progress) -> TuneOutcome:
    """Search for the best setting by simulating the GPU `device`, or this machine if `device` is "local"."""

    async def simulate(config: EngineConfig) -> Blueprint:
        return make_blueprint(config, device, progress)

    kind = device_memory(task.options.given.get("device", "auto")).kind if device == LOCAL else "cuda"
    blueprint, refused = await _open_largest(task, kind, simulate)
    for note in blueprint.notes:
        render.warn(note)
    simulated, config = blueprint.plan.device, blueprint.config
    outcome = TuneOutcome(
        task,
        _model_table(task.model, progress),
        device_table(simulated.kind) if device == LOCAL else {"kind": simulated.kind, "name": simulated.name},
        blueprint.provenance,
        TrialHistory(task.slo, task.goal, _default(task, config), exact=True),
    )
    load = TrialLoad(task.load, task.slo, task.timeout, encode=TextEncode(task.model, render.warn))
    await _search(outcome, config, refused, SimulatedRunner(blueprint.engine, load), progress)
    return outcome


def _model_table(model: str, progress: Progress) -> dict[str, str]:
    planner = open_planner(model, progress)
    architecture = str((planner.content.get("architectures") or [""])[0])
    return {"name": model_name(model), "architecture": architecture, "digest": planner.digest}


def _warn_of_long_load(task: TuneTask) -> None:
    seconds = task.load.stop_after or task.load.last_offset
    if seconds > task.time_limit / _FULL_RUNS:
        once, whole = render.human_seconds(seconds), render.human_seconds(task.time_limit)
        render.warn(
            f"sending this load once takes {once}, but the time limit of the whole search is {whole}: set a longer "
            "--time-limit or reduce the load (--limit, --speedup, --num-prompts)"
        )


async def _open_largest(
    task: TuneTask, kind: str, open_target: Callable[[EngineConfig], Awaitable[Target]]
) -> tuple[Target, dict[int, str]]:
    """Call `open_target` with ever smaller token budgets until one fits into memory.

    Return the opened target, and the reasons why larger budgets do not fit. Raises ConfigError if none fits, and
    LlmschedError if the scheduling policy cannot be tuned.
    """
    if (policy := task.options.given.get("scheduling_policy", "fair")) != "fair":
        raise LlmschedError(
            f"--scheduling-policy {policy} is a baseline that lacks the knobs searched here; use bench --compare to "
            "compare it with fair"
        )
    load = task.load
    concurrency = load.num_requests if task.by_knee else load.max_concurrency or load.num_requests
    tokens = max(task.smallest_budget, largest_budget(kind, concurrency, load.longest_input))
    defaults = {"max_num_batched_tokens": tokens, "max_queue_size": max(_QUEUE, load.num_requests)}
    config, refused = task.options.config(task.model, defaults), dict[int, str]()
    while True:
        try:
            target = await open_target(config)
            break
        except ConfigError as problem:
            tokens = config.max_num_batched_tokens or tokens
            if problem.field == "simulate" or tokens <= task.smallest_budget:
                raise
            refused[tokens] = " ".join(problem.text(flag).split())
            config = replace(config, max_num_batched_tokens=powers_of_two(task.smallest_budget, tokens)[-2])
    for tokens, reason in refused.items():
        end = f"the sweep ends at {config.max_num_batched_tokens}"
        render.note(f"max_num_batched_tokens {tokens} does not fit ({reason}); {end}")
    return target, refused


async def _search(
    outcome: TuneOutcome,
    config: ResolvedConfig,
    refused: dict[int, str],
    runner: EngineRunner | SimulatedRunner,
    progress: Progress,
) -> None:
    now = asyncio.get_running_loop().time
    task, history, load = outcome.task, outcome.history, outcome.task.load
    began = now()
    runner.deadline = deadline = began + task.time_limit
    start = history.default
    budgets = powers_of_two(task.smallest_budget, config.max_num_batched_tokens)
    if task.warm_start and (name := latest_profile(outcome.model, outcome.device)) is not None:
        start, note = _warm_start(task, name, start, config)
        budgets = sorted({*budgets, max(task.smallest_budget, start.max_num_batched_tokens)})
        outcome.notes.append(note)
    identity = _identity(outcome, budgets)
    resumable = ResumableRunner(runner, state_path(task.destination), identity, resume=task.resume, deadline=deadline)
    lengths = rung_lengths(load.num_requests, load.max_concurrency or 1)
    longest = _LONGEST_SIMULATED if history.exact else task.time_limit / _RUNS_AT_RATES
    short = lengths[-1] if history.exact else lengths[-2:][0]
    make_finder = partial(KneeFinder, resumable, load, task.slo, short, longest, progress=progress)
    find = make_finder(tolerance=SIMULATED_TOLERANCE if history.exact else MEASURED_TOLERANCE)
    guess = None if history.exact else make_finder(tolerance=SIMULATED_TOLERANCE, predicted=True)

    async def race(rate: float | None) -> Race:
        lengths = rung_lengths(max(load.num_requests, find.requests(rate)), load.max_concurrency or 1)
        if history.exact:
            # Short runs only save time, so if a simulation is fast enough, every setting runs in full.
            with suppress(OutOfTimeError):
                pilot = await resumable.run(start, lengths[0], 0, rate)
                if pilot.seconds / lengths[0] * lengths[-1] * _ALL_RUNS <= deadline - now():
                    lengths = lengths[-1:]
        return Race(resumable, history, lengths, task.rounds, deadline - now(), progress, rate)

    space = SearchSpace(task.knobs, tuple(budgets), start, config.max_num_seqs, config.max_headroom, refused)
    rate_search = RateSearch(history, load, space, race, find, guess, outcome.rates, outcome.notes)
    history.chosen = await (rate_search.by_knee() if task.by_knee else rate_search.at_given())
    if disturbed := [run.others_cpu for run in history.all_runs if run.others_cpu > _BUSY_SHARE]:
        outcome.warnings.append(
            f"{len(disturbed)} of {len(history.all_runs)} runs may be too slow, {BUSY}, which used up to "
            f"{max(disturbed):.0%} of its CPU time: run tune again when it is idle"
        )
    resumable.delete_journal()
    outcome.seconds = now() - began


def _default(task: TuneTask, config: ResolvedConfig) -> Setting:
    """Return the setting that serve has without a profile, within the limits given by the flags of the search."""
    usual = DEFAULT_TOKEN_BUDGET[config.device]
    tokens = max(task.smallest_budget, min(usual, config.max_num_batched_tokens))
    return Setting(**{knob: getattr(config, knob) for knob in KNOBS} | {"max_num_batched_tokens": tokens})


def _warm_start(task: TuneTask, profile: str, start: Setting, config: ResolvedConfig) -> tuple[Setting, str]:
    """Return `start` with the profile's knob values, and a note for the user that says if the profile was used."""
    limits = {"max_num_batched_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs}
    fixed = task.options.given.keys() - {"max_num_batched_tokens"}
    try:
        settings = profile_settings(profile)
        known = {knob: settings[knob] for knob in KNOBS if knob in settings and knob not in fixed}
        known = {knob: value for knob, value in known.items() if value <= limits.get(knob, value)}
        replace(config, **known)
    except ConfigError as error:
        return start, f"profile {profile} was not used as the start of the search: {error}"
    if not known:
        return start, f"profile {profile} was not used as the start of the search: flags or limits exclude its settings"
    return replace(start, **known), f"the search started from profile {profile}"


def _identity(outcome: TuneOutcome, budgets: Sequence[int]) -> dict[str, Any]:
    """Return everything that must be unchanged for `--resume` to continue a search."""
    task, origin = outcome.task, outcome.provenance
    return {
        "model": dict(outcome.model),
        "device": dict(outcome.device),
        "kind": "measured" if origin.measured else "simulated",
        "cost of steps": [origin.where, origin.calibration_error, origin.published_error],
        "load": f"{task.load.describe_requests()}, {task.load.describe()}, seed {task.load.seed}",
        "fingerprint of the load": task.load.parameters()["fingerprint"],
        "SLOs": asdict(task.slo),
        "token budgets": budgets,
        "rate": task.judged_by,
        "number of rounds": task.rounds,
        **{name: getattr(task, name) for name in ("timeout", "goal", "knobs")},
        "engine settings": {name: str(value) for name, value in sorted(task.options.given.items())},
        "version": version("llmsched"),
    }
