"""Rules of `doctor`: each has a simulated run that triggers exactly this rule, and a healthy run triggers none."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from configs import CONFIGS

from llmsched.cli.doctor.evidence import saved_evidence
from llmsched.cli.doctor.rules import RULES, Diagnosis, diagnose
from llmsched.cli.figures import engine_counts
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import measure
from llmsched.cli.figures.record import LoopLag, RunRecord
from llmsched.cli.figures.registry import as_json
from llmsched.cli.load.load import Load
from llmsched.cli.load.random_lengths import parse_lengths
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.load.traces.trace import Content, Trace, TraceRequest
from llmsched.cli.main import load as load_command
from llmsched.cli.targets.simulated_target import make_blueprint, simulate_run
from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import RowResult, StepResult
from llmsched.engine.executor.simulated_executor import SimulatedExecutor
from llmsched.engine.goodput import Slo

MODEL = str(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json")


@dataclass(frozen=True)
class Case:
    """A load, the settings of the simulated H100 that serves it, and what the finding must say."""

    load: Load
    says: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    prepare: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    change: Callable[[RunRecord], RunRecord] = lambda run: run


def steady(**changes: Any) -> SyntheticLoad:
    """Return a load that the default settings serve well."""
    return SyntheticLoad(**{"num_prompts": 100, "request_rate": 10.0, "input_len": 500, "output_len": 100, **changes})


def changing_prompts() -> TraceLoad:
    """Return prompts whose token 1,843 is an id, with 2,000 equal tokens before and after it."""
    before, after = (" ".join(f"{word}{n}" for n in range(count)) for word, count in (("a", 1843), ("b", 2000)))
    requests = tuple(
        TraceRequest(n, n / 2, output_len=20, content=Content(f"{before} id{n} {after}")) for n in range(60)
    )
    return TraceLoad(trace=Trace("t.jsonl", "log", requests, timed=True))


def repeated_prompts(kinds: int) -> TraceLoad:
    """Return prompts of 1,024 tokens of which there are `kinds`, one after the other, over and over."""
    requests = tuple(
        TraceRequest(n, n / 10, 1024, 20, hash_ids=(2 * (n % kinds), 2 * (n % kinds) + 1)) for n in range(5 * kinds)
    )
    return TraceLoad(trace=Trace("m.jsonl", "mooncake", requests, timed=True))


def late_client(run: RunRecord) -> RunRecord:
    return replace(run, own_process=True, loop_lags=[LoopLag(float(n), 1.5) for n in range(20)])


def failing_rows(patch: pytest.MonkeyPatch) -> None:
    """Make the fifth step fail for all of its requests."""
    steps, execute = itertools.count(1), SimulatedExecutor.execute

    def failing(self: SimulatedExecutor, plan: Any) -> StepResult:
        result = execute(self, plan)
        if next(steps) != 5:
            return result
        return replace(result, rows=[RowResult(error="no such expert") for _ in result.rows])

    patch.setattr(SimulatedExecutor, "execute", failing)


def late_compilations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_counts, "num_compiled", itertools.count(40, 3).__next__)


CASES = {
    "client late": Case(steady(), ("P99 of its lag is 1.50 s",), change=late_client),
    "requests failed": Case(
        steady(), ("of 100 requests failed; ended by error (no such expert): ",), prepare=failing_rows
    ),
    "requests refused": Case(
        steady(request_rate=float("inf")),
        ("98 of 100 requests were refused", "at most 2 may"),
        {"max_queue_size": 2},
    ),
    "clients gave up": Case(
        steady(output_len=parse_lengths("20..200", "output_len")), ("clients gave up",), timeout=1.5
    ),
    "prompts change": Case(
        changing_prompts(), ("prompts change at token 1,843", "50 of the last 50 requests"), {"max_model_len": 8192}
    ),
    "prefixes evicted": Case(
        repeated_prompts(30), ("their prefix was evicted",), {"num_gpu_blocks_override": 1000, "max_model_len": 2048}
    ),
    "preemptions": Case(
        steady(num_prompts=24, input_len=100, output_len=400, request_rate=float("inf")),
        ("the preemption rate is ",),
        {
            "num_gpu_blocks_override": 600,
            "max_model_len": 1024,
            "output_prediction": "none",
            "headroom": 0.0,
            "max_headroom": 0.0,
        },
    ),
    "idle KV memory": Case(steady(), ("although only", "place among the running requests"), {"max_num_seqs": 4}),
    "queue without load": Case(
        steady(input_len=1000, request_rate=20.0),
        ("although only", "memory that is kept"),
        {"num_gpu_blocks_override": 1200, "max_model_len": 2048, "headroom": 0.5, "max_headroom": 0.5},
    ),
    "KV memory full": Case(
        steady(input_len=1000, output_len=200, request_rate=20.0),
        ("of KV memory is in use",),
        {"num_gpu_blocks_override": 800, "max_model_len": 2048},
    ),
    "prefill too slow": Case(steady(input_len=2000), ("for token budget",), {"max_num_batched_tokens": 128}),
    "decodes stall": Case(
        steady(input_len=6000, request_rate=3.0),
        ("long steps of prefills",),
        {"max_num_batched_tokens": 16384, "scheduling_policy": "fcfs"},
    ),
    "context too short": Case(steady(), ("P99 of a request's length is 600 tokens",), {"max_model_len": 640}),
    "context too long": Case(
        steady(request_rate=2.0),
        ("one request may have 16,384", "82% of KV memory"),
        {"num_gpu_blocks_override": 1250, "max_model_len": 16384},
    ),
    "KV memory wasted": Case(steady(input_len=40, output_len=20), ("reserved and still empty",), {"block_size": 256}),
    "late compilations": Case(steady(), ("3 kernels were compiled",), prepare=late_compilations),
}


def diagnosis(case: Case) -> Diagnosis:
    blueprint = make_blueprint(EngineConfig(model=MODEL, **case.settings), "h100")
    run = case.change(simulate_run(blueprint, case.load, timeout=case.timeout))
    experiment = Experiment("m", blueprint.provenance, case.load, Slo(), 0, blueprint.config.chosen())
    return diagnose(saved_evidence(as_json(experiment, measure(run, case.load, Slo())), "run.json"))


@pytest.mark.parametrize("load", [steady(), steady(request_rate=None, max_concurrency=16), repeated_prompts(30)])
def test_a_healthy_run_has_no_finding(load: Load) -> None:
    assert diagnosis(Case(load)) == Diagnosis([], [])


@pytest.mark.parametrize("name", CASES)
def test_a_run_triggers_exactly_its_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    case.prepare(monkeypatch)
    found = diagnosis(case)
    assert [finding.rule for finding in found.findings] == [name], found
    (finding,) = found.findings
    for part in case.says:
        assert part in finding.problem
    assert all(flag in finding.remedy for flag in finding.flags)


def test_every_rule_has_its_run_and_names_flags_of_serve() -> None:
    assert [rule.name for rule in RULES] == list(CASES)
    options = {option for parameter in load_command("serve").params for option in parameter.opts}
    assert {flag for rule in RULES for flag in rule.flags} <= options
