"""One search from a model to its result: the engine, where to start, what to keep on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsched.cli import render
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, WordEncode
from llmsched.cli.options.engine import EngineOptions
from llmsched.cli.targets.simulated_target import TextEncode, make_blueprint
from llmsched.cli.tune.knob_search import SearchSpace, search
from llmsched.cli.tune.knobs import KNOBS, Setting, largest_useful, powers_of_two
from llmsched.cli.tune.race import Race, RaceRules, TrialRunner, rung_lengths
from llmsched.cli.tune.resume import ResumableRunner, SearchJournal, state_path
from llmsched.cli.tune.runner import EngineRunner
from llmsched.cli.tune.simulated_runner import SimulatedRunner, TrialLoad
from llmsched.cli.tune.subject import Subject, simulated_subject, subject_of
from llmsched.cli.tune.trials import Goal, TrialHistory
from llmsched.engine.config import EngineConfig, ResolvedConfig
from llmsched.engine.device import device_memory
from llmsched.engine.errors import ConfigError, LlmschedError
from llmsched.engine.latency import Slo
from llmsched.engine.memory.planner import open_planner
from llmsched.engine.progress import Progress
from llmsched.profiles.calibrated import LOCAL
from llmsched.profiles.tuned import TunedProfile, latest_profile

if TYPE_CHECKING:
    from llmsched.engine.service import AsyncEngine

#: Runs in full that a search is likely to need, and runs if all are in full.
_FULL_RUNS, _ALL_RUNS = 10, 25

#: Token budgets for which no engine could be built, and why not.
Refused = dict[int, ConfigError]

#: Largest step worth trying where no flag says so, by device: beyond it a step only gets longer.
_LARGEST = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Task:
    """What to find out: `knobs` are searched, the best settings measured up to `rounds` times.

    `timeout` (of a request) and `time_limit` (of the search) are in seconds; `smallest` is the least token budget. The
    state of the search lies beside `destination`, the profile that is to be written.
    """

    load: Load
    slo: Slo
    goal: Goal
    knobs: tuple[str, ...]
    timeout: float
    rounds: int
    time_limit: float
    smallest: int
    destination: Path
    resume: bool = False
    warm_start: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found; `notes` say what was left out, and why."""

    subject: Subject
    task: Task
    history: TrialHistory
    notes: tuple[str, ...]
    seconds: float


async def tune_engine(model: str, task: Task, options: EngineOptions, progress: Progress) -> Outcome:
    """Search on an engine in this process. Raises ModelError, ConfigError, LlmschedError (of the state)."""
    kind = device_memory(options.given.get("device", "auto")).kind
    if (seconds := _schedule_seconds(task.load)) > task.time_limit / _FULL_RUNS:
        once, whole = render.human_seconds(seconds), render.human_seconds(task.time_limit)
        render.warn(
            f"sending this load once takes {once}, and {whole} are for the whole search: give a longer --time-limit or "
            "less load (--limit, --speedup, --num-prompts)"
        )
    config, refused = _config(model, kind, task, options), Refused()
    runner, engine = await _largest_engine(config, task, refused, progress)
    try:
        return await _run(
            subject_of(model, open_planner(model, progress), engine.core),
            engine.core.config,
            refused,
            runner,
            task,
            options,
            progress,
        )
    finally:
        await runner.close()


async def tune_simulated(model: str, device: str, task: Task, options: EngineOptions, progress: Progress) -> Outcome:
    """Search on a GPU that is not there, or on "local", this device as it was calibrated. Raises as `tune_engine`."""
    kind = device_memory(options.given.get("device", "auto")).kind if device == LOCAL else "cuda"
    planner, config, refused = open_planner(model, progress), _config(model, kind, task, options), Refused()
    while True:
        try:
            blueprint = make_blueprint(config, device, progress)
            break
        except ConfigError as problem:
            if problem.field == "simulate":
                raise
            config = _smaller(config, task, refused, problem)
    _tell(refused, blueprint.config)
    for note in blueprint.notes:
        render.warn(note)
    # A virtual clock does not drift, so that to repeat what was run in full tells little.
    task = replace(task, rounds=1)
    asked = TrialLoad(task.load, task.slo, task.timeout, encode=TextEncode(model, render.warn))
    runner = SimulatedRunner(blueprint, asked)
    subject = simulated_subject(model, planner, blueprint)
    return await _run(subject, blueprint.config, refused, runner, task, options, progress)


def _schedule_seconds(load: Load) -> float:
    """How long it takes to send the load, at least."""
    if load.closed:
        return load.stop_after or 0.0
    return max((request.offset for request in load.plan(COMMON_IDS, WordEncode(COMMON_IDS))), default=0.0)


async def _run(
    subject: Subject,
    config: ResolvedConfig,
    refused: Refused,
    runner: TrialRunner,
    task: Task,
    options: EngineOptions,
    progress: Progress,
) -> Outcome:
    """Search with a runner whose engine has this configuration, after larger ones were refused."""
    now = asyncio.get_running_loop().time
    start = now()
    space, notes = _space(config, task, subject, refused)
    about = _about(subject, task, space, options.given)
    journal = SearchJournal(state_path(task.destination), about, resume=task.resume)
    history, runner = (
        TrialHistory(task.slo, task.goal, exact=not subject.provenance.measured),
        ResumableRunner(runner, journal),
    )
    lengths = rung_lengths(task.load.num_requests, task.load.max_concurrency or 1)
    if not subject.provenance.measured and await _all_in_full(runner, space.start, lengths, task.time_limit):
        lengths = lengths[-1:]
    rules = RaceRules(lengths, task.rounds, task.time_limit, drifts=subject.provenance.measured)
    race = Race(runner, history, rules, progress)
    notes += await search(space, race)
    journal.delete()
    return Outcome(subject, task, history, tuple(notes), now() - start)


async def _all_in_full(runner: TrialRunner, start: Setting, lengths: tuple[int, ...], time_limit: float) -> bool:
    """Whether a virtual clock is fast enough for every setting to be run in full: short runs only save time."""
    pilot = await runner.run(start, lengths[0], 0)
    return pilot.seconds / lengths[0] * lengths[-1] * _ALL_RUNS <= time_limit


async def _largest_engine(
    config: EngineConfig, task: Task, refused: Refused, progress: Progress
) -> tuple[EngineRunner, AsyncEngine]:
    """An engine for the largest step that fits into memory; larger ones end up in `refused`."""
    while True:
        runner = EngineRunner(config, TrialLoad(task.load, task.slo, task.timeout), progress)
        try:
            engine = await runner.engine()
        except ConfigError as problem:
            config = _smaller(config, task, refused, problem)
        else:
            _tell(refused, engine.core.config)
            return runner, engine


def _smaller(config: EngineConfig, task: Task, refused: Refused, problem: ConfigError) -> EngineConfig:
    """The same with the next smaller token budget, after one that did not fit; re-raises if that was the smallest."""
    tokens = config.max_num_batched_tokens
    assert tokens is not None
    smaller = powers_of_two(task.smallest, tokens)[:-1]
    if not smaller:
        raise problem
    refused[tokens] = problem
    return replace(config, max_num_batched_tokens=smaller[-1])


def _tell(refused: Refused, config: EngineConfig) -> None:
    for tokens, problem in refused.items():
        end = f"the sweep ends at {config.max_num_batched_tokens}"
        render.note(f"max_num_batched_tokens {tokens} does not fit ({problem}); {end}")


def _config(model: str, kind: str, task: Task, options: EngineOptions) -> EngineConfig:
    """The engine for the largest step of the search; every setting is within what it reserves."""
    if (policy := options.given.get("scheduling_policy", "fair")) != "fair":
        raise LlmschedError(
            f"--scheduling-policy {policy}: it is a baseline, without what is searched here; bench --compare sets it "
            "against fair"
        )
    load = task.load
    useful = largest_useful(load.max_concurrency or load.num_requests, load.longest_input)
    largest = max(task.smallest, min(_LARGEST[kind], useful))
    return options.config(model, {"max_num_batched_tokens": largest, "max_queue_size": max(2048, load.num_requests)})


def _space(config: ResolvedConfig, task: Task, subject: Subject, refused: Refused) -> tuple[SearchSpace, list[str]]:
    """Where to search, from the last profile of this model and device where there is one, and which that is."""
    start, notes = Setting(**{knob: getattr(config, knob) for knob in KNOBS}), []
    budgets = powers_of_two(task.smallest, config.max_num_batched_tokens)
    if task.warm_start and (found := latest_profile(subject.model, subject.device)) is not None:
        name, profile = found
        start = _warm(start, profile, config)
        if task.smallest <= start.max_num_batched_tokens <= config.max_num_batched_tokens:
            budgets = sorted({*budgets, start.max_num_batched_tokens})
        notes.append(f"the search began from profile {name}")
    return SearchSpace(task.knobs, tuple(budgets), start, config.max_num_seqs, config.max_headroom, refused), notes


def _warm(start: Setting, profile: TunedProfile, config: EngineConfig) -> Setting:
    """The profile's values of the knobs, where this engine allows them and no flag has set another default."""
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


def _about(subject: Subject, task: Task, space: SearchSpace, given: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a search to go on."""
    origin = subject.provenance
    return {
        "model": dict(subject.model),
        "device": dict(subject.device),
        "kind": "measured" if origin.measured else "simulated",
        "cost of steps": [origin.where, origin.calibration_error, origin.published_error],
        "load": f"{task.load.describe_requests()}, {task.load.describe()}, seed {task.load.seed}",
        "fingerprint of the load": task.load.parameters()["fingerprint"],
        "timeout": task.timeout,
        "SLOs": {f.name: getattr(task.slo, f.name) for f in fields(task.slo)},
        "goal": task.goal,
        "knobs": list(task.knobs),
        "token budgets": list(space.budgets),
        "number of rounds": task.rounds,
        "engine settings": {name: str(value) for name, value in sorted(given.items())},
        "version": version("llmsched"),
    }
