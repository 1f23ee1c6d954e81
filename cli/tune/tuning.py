"""Tuning job: build an engine or a simulation, search its settings and collect the outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from llmsched.cli import render
from llmsched.cli.figures.client_lag import BUSY
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, WordEncoder
from llmsched.cli.options.engine_flags import EngineOptions
from llmsched.cli.options.flags import flag
from llmsched.cli.profiles.apply import device_table
from llmsched.cli.targets.simulated_target import TextEncode, make_blueprint
from llmsched.cli.tune.choice import Chooser, JudgedBy
from llmsched.cli.tune.knees import MEASURED_TOLERANCE, SIMULATED_TOLERANCE, KneeFinder, RateReport, scalable
from llmsched.cli.tune.knob_search import SearchSpace
from llmsched.cli.tune.knobs import KNOBS, Setting, largest_useful, powers_of_two
from llmsched.cli.tune.race import OutOfTimeError, Race, TrialRunner, rung_lengths
from llmsched.cli.tune.resume import ResumableRunner, state_path
from llmsched.cli.tune.runners import EngineRunner, SimulatedRunner, TrialLoad
from llmsched.cli.tune.trial_runs import TrialRun
from llmsched.cli.tune.trials import Goal, TrialHistory
from llmsched.engine.config import EngineConfig, ResolvedConfig
from llmsched.engine.device import device_memory
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.plan import ratios
from llmsched.engine.memory.planner import DEFAULT_TOKEN_BUDGET, model_name, open_planner
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance
from llmsched.engine.simulated_engine import Blueprint
from llmsched.profiles.calibrated import LOCAL
from llmsched.profiles.toml_files import Scalar
from llmsched.profiles.tuned import TunedProfile, latest_profile

#: Numbers of full runs that a search needs: usually _FULL_RUNS, but _ALL_RUNS for a simulation without short runs.
_FULL_RUNS, _ALL_RUNS = 10, 25

#: Largest token budget tried by default, by kind of device; larger steps only take longer.
_LARGEST = {"cpu": 1024, "cuda": 8192}
#: Seconds that a simulated run at a request rate may last on its own clock. A measured one may last the time limit
#: divided by the number of such runs that a search needs.
_LONGEST_SIMULATED, _RUNS_AT_RATES = 30.0, 12
#: A run is disturbed if other processes used more than this share of the machine's CPU time.
_BUSY_SHARE = 0.15
#: Waiting requests allowed, for loads that are made longer.
_QUEUE = 100_000

#: Token budgets that do not fit into memory, each with the error.
Refused = dict[int, ConfigError]

Target = TypeVar("Target")


@dataclass(frozen=True, slots=True)
class TuneTask:
    """Task of one `llmsched tune` command: the model, the load and SLOs, and the limits of the search.

    The best settings get up to `rounds` full runs. `timeout` limits each request and `time_limit` the whole search,
    both in seconds. `smallest` is the smallest token budget to try. The profile is written to `destination`, and the
    search journal beside it. With `resume` the search continues from that journal. With `warm_start` it starts from the
    latest profile of the same model and device.
    """

    model: str
    options: EngineOptions
    load: Load
    slo: Slo
    goal: Goal
    knobs: tuple[str, ...]
    timeout: float
    rounds: int
    time_limit: float
    smallest: int
    destination: Path
    judged_by: JudgedBy = "knee"
    resume: bool = False
    warm_start: bool = True

    @property
    def by_knee(self) -> bool:
        """True if settings are judged by their knees, which needs SLOs and a load that can be sent at any rate."""
        return self.judged_by == "knee" and bool(self.slo.given()) and scalable(self.load)


@dataclass(slots=True)
class TuneOutcome:
    """Outcome of a search that took `seconds`. `notes` tell the user what was left out, and why.

    `model`, `device` and `memory` are tables of the profile. `memory` holds ratios of actual to predicted bytes.
    """

    task: TuneTask
    model: Mapping[str, str]
    device: Mapping[str, Scalar]
    memory: Mapping[str, Scalar]
    provenance: Provenance
    history: TrialHistory
    rates: RateReport = field(default_factory=RateReport)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0


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
        engine, planner = (await runner.engine()).core, open_planner(task.model, progress)
        outcome = TuneOutcome(
            task,
            {"name": engine.model.name, "architecture": engine.model.architecture, "digest": planner.digest},
            device_table(engine.config.device),
            {} if engine.plan is None else ratios(engine.plan),
            Provenance("in process"),
            TrialHistory(task.slo, task.goal),
        )
        runner.end_at(time.monotonic() + task.time_limit)
        await _search(outcome, engine.config, refused, runner, progress)
    finally:
        await runner.close()
    return outcome


async def tune_simulated(task: TuneTask, device: str, progress: Progress) -> TuneOutcome:
    """Search for the best setting on a simulated GPU, or on "local", the device that `llmsched calibrate` measured."""

    async def simulate(config: EngineConfig) -> Blueprint:
        return make_blueprint(config, device, progress)

    planner = open_planner(task.model, progress)
    kind = device_memory(task.options.given.get("device", "auto")).kind if device == LOCAL else "cuda"
    blueprint, refused = await _open_largest(task, kind, simulate)
    for note in blueprint.notes:
        render.warn(note)
    simulated = blueprint.plan.device
    here = device_table(simulated.kind) if blueprint.provenance.calibration_error is not None else {}
    architecture = str((planner.content.get("architectures") or [""])[0])
    outcome = TuneOutcome(
        task,
        {"name": model_name(task.model), "architecture": architecture, "digest": planner.digest},
        here or {"kind": simulated.kind, "name": simulated.name},
        {},
        blueprint.provenance,
        TrialHistory(task.slo, task.goal, exact=True),
    )
    encode, deadline = TextEncode(task.model, render.warn), time.monotonic() + task.time_limit
    load = TrialLoad(task.load, task.slo, task.timeout, encode=encode, deadline=deadline)
    await _search(outcome, blueprint.config, refused, SimulatedRunner(blueprint, load), progress)
    return outcome


def _warn_of_long_load(task: TuneTask) -> None:
    """Warn if the time limit is too short for the usual number of runs of the load."""
    load = task.load
    if load.closed:
        seconds = load.stop_after or 0.0
    else:
        seconds = max((request.offset for request in load.plan(COMMON_IDS, WordEncoder(COMMON_IDS))), default=0.0)
    if seconds > task.time_limit / _FULL_RUNS:
        once, whole = render.human_seconds(seconds), render.human_seconds(task.time_limit)
        render.warn(
            f"sending this load once takes {once}, but the time limit of the whole search is {whole}: set a longer "
            "--time-limit or reduce the load (--limit, --speedup, --num-prompts)"
        )


async def _open_largest(
    task: TuneTask, kind: str, open_target: Callable[[EngineConfig], Awaitable[Target]]
) -> tuple[Target, Refused]:
    """Call `open_target` with ever smaller token budgets until one fits into memory.

    Return the opened target and the budgets that did not fit. Raises ConfigError if none fits, and LlmschedError if the
    scheduling policy cannot be tuned.
    """
    if (policy := task.options.given.get("scheduling_policy", "fair")) != "fair":
        raise LlmschedError(
            f"--scheduling-policy {policy} is a baseline that lacks the knobs searched here; use bench --compare to "
            "compare it with fair"
        )
    load = task.load
    concurrency = load.num_requests if task.by_knee else load.max_concurrency or load.num_requests
    useful = largest_useful(concurrency, load.longest_input)
    defaults = {
        "max_num_batched_tokens": max(task.smallest, DEFAULT_TOKEN_BUDGET[kind], min(_LARGEST[kind], useful)),
        "max_queue_size": max(_QUEUE, load.num_requests),
    }
    config, refused = task.options.config(task.model, defaults), Refused()
    while True:
        try:
            target = await open_target(config)
            break
        except ConfigError as problem:
            if problem.field == "simulate":
                raise
            tokens = config.max_num_batched_tokens
            assert tokens is not None
            smaller = powers_of_two(task.smallest, tokens)[:-1]
            if not smaller:
                raise
            refused[tokens] = problem
            config = replace(config, max_num_batched_tokens=smaller[-1])
    for tokens, error in refused.items():
        end = f"the sweep ends at {config.max_num_batched_tokens}"
        render.note(f"max_num_batched_tokens {tokens} does not fit ({error.text(flag)}); {end}")
    return target, refused


async def _search(
    outcome: TuneOutcome, config: ResolvedConfig, refused: Refused, runner: TrialRunner, progress: Progress
) -> None:
    """Search with a runner whose engine has the settings of `config`, and fill in the outcome."""
    now = asyncio.get_running_loop().time
    began, task = now(), outcome.task
    start = default = _default(task, config)
    budgets = powers_of_two(task.smallest, config.max_num_batched_tokens)
    if task.warm_start and (found := latest_profile(outcome.model, outcome.device)) is not None:
        name, profile = found
        start = _warm_start(start, profile, config)
        if task.smallest <= start.max_num_batched_tokens <= config.max_num_batched_tokens:
            budgets = sorted({*budgets, start.max_num_batched_tokens})
        outcome.notes.append(f"the search started from profile {name}")
    identity = _identity(outcome, budgets)
    deadline = began + task.time_limit
    resumable = ResumableRunner(runner, state_path(task.destination), identity, resume=task.resume, deadline=deadline)
    history, load = outcome.history, task.load
    history.default = default
    lengths = rung_lengths(load.num_requests, load.max_concurrency or 1)
    longest = _LONGEST_SIMULATED if history.exact else task.time_limit / _RUNS_AT_RATES
    short = lengths[-1] if history.exact else lengths[-2:][0]
    make_finder = partial(KneeFinder, resumable, load, task.slo, requests=short, longest=longest, progress=progress)
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
    chooser = Chooser(history, default, load, space, race, find, guess, outcome.rates, outcome.notes)
    history.chosen = await (chooser.by_knee() if task.by_knee else chooser.at_given())
    outcome.warnings += _busy(history.all_runs)
    resumable.delete_journal()
    outcome.seconds = now() - began


def _busy(runs: Sequence[TrialRun]) -> list[str]:
    """Return a warning if other processes kept the machine busy during the runs."""
    disturbed = [run.others_cpu for run in runs if run.others_cpu > _BUSY_SHARE]
    if not disturbed:
        return []
    return [
        f"{len(disturbed)} of {len(runs)} runs may be too slow, {BUSY}, which used up to {max(disturbed):.0%} of its "
        "CPU time: run tune again when it is idle"
    ]


def _default(task: TuneTask, config: ResolvedConfig) -> Setting:
    """Return the setting that serve has without a profile, within the limits that the flags of the search set."""
    usual = DEFAULT_TOKEN_BUDGET[config.device]
    tokens = max(task.smallest, min(usual, config.max_num_batched_tokens))
    return Setting(**{knob: getattr(config, knob) for knob in KNOBS} | {"max_num_batched_tokens": tokens})


def _warm_start(start: Setting, profile: TunedProfile, config: EngineConfig) -> Setting:
    """Return `start` with the profile's knob values, except those above the limits and those that a flag sets."""
    plain = EngineConfig()
    known: dict[str, Any] = {}
    for knob in KNOBS:
        value = profile.engine.get(knob)
        untouched = knob == "max_num_batched_tokens" or getattr(config, knob) == getattr(plain, knob)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not untouched:
            continue
        most = getattr(config, knob) if knob in ("max_num_batched_tokens", "max_num_seqs") else None
        if most is None or value <= most:
            known[knob] = value
    try:
        replace(config, **known)
    except ConfigError:
        return start
    return replace(start, **known)


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
        "timeout": task.timeout,
        "SLOs": {f.name: getattr(task.slo, f.name) for f in fields(task.slo)},
        "goal": task.goal,
        "rate": task.judged_by,
        "knobs": list(task.knobs),
        "token budgets": list(budgets),
        "number of rounds": task.rounds,
        "engine settings": {name: str(value) for name, value in sorted(task.options.given.items())},
        "version": version("llmsched"),
    }
