"""The state of a replica describes its queue, its speed and its cache as they are."""

from __future__ import annotations

import pytest
from configs import resolved
from simulated_run import LinearCost

from llmsched.engine.kv.cache_summary import prefix_hashes
from llmsched.engine.kv.manager import make_kv
from llmsched.engine.kv.prefix_tree import encode
from llmsched.engine.routing.replica_state import StateReporter
from llmsched.engine.simulated_engine import SimulatedEngine

COST = LinearCost(0.01, 1e-4, 1e-3, 0.0)


def make_engine(blocks: int = 256, **knobs: int) -> tuple[SimulatedEngine, StateReporter]:
    config = resolved(**{"max_num_batched_tokens": 512, "max_num_seqs": 4, "headroom": 0.0, **knobs})
    engine = SimulatedEngine(config, make_kv(config, blocks), COST)
    return engine, StateReporter(engine.scheduler)


def backlog(reporter: StateReporter) -> float:
    """Return the backlog in tokens; without learned step times, each takes the same time."""
    state = reporter.report(0.0)
    return round(state.backlog_seconds / state.token_seconds, 6)


def warm_up(engine: SimulatedEngine) -> None:
    for index in range(4):
        engine.add(f"warm-up-{index}", range(9000 + 1000 * index, 9300 + 1000 * index), 20, 0.0)
    while engine.has_work():
        engine.step()


def test_an_idle_replica_has_no_backlog_and_admits_all() -> None:
    engine, reporter = make_engine()
    state = reporter.report(3.0)
    assert (state.time, state.backlog_seconds, state.num_waiting, state.num_admissible) == (3.0, 0, 0, 4)
    assert (state.admission_seconds, state.prefixes) == (0.0, frozenset())
    assert not engine.has_work()


def test_waiting_and_half_computed_prompts_are_the_backlog() -> None:
    engine, reporter = make_engine()
    engine.add("a", range(1000), 5, 0.0)
    engine.add("b", range(5000, 5700), 5, 0.0)
    assert backlog(reporter) == 1700
    assert reporter.report(0.0).num_waiting == 2
    engine.step()
    assert backlog(reporter) == 1700 - 512


def test_a_cached_prompt_is_no_backlog() -> None:
    engine, reporter = make_engine()
    engine.add("a", range(600), 1, 0.0)
    while engine.has_work():
        engine.step()
    assert reporter.report(0.0).prefixes == set(prefix_hashes(encode(range(600)), "", 256))
    engine.add("b", range(600), 1, 0.0)
    assert backlog(reporter) <= 16


def test_the_speed_is_what_steps_take() -> None:
    engine, reporter = make_engine()
    warm_up(engine)
    state = reporter.report(0.0)
    assert state.token_seconds == pytest.approx((0.01 + 512 * 1e-4) / 512, rel=0.05)
    for index in range(3):
        engine.add(f"{index}", range(1000 * index, 1000 * index + 10), 100, engine.clock.now)
    engine.step()
    engine.step()
    state = reporter.report(0.0)
    assert state.step_seconds == pytest.approx(0.013, rel=0.05)
    assert state.admission_seconds > 0
    assert state.num_admissible == 1


def test_scarce_memory_limits_admissions() -> None:
    engine, reporter = make_engine(blocks=24, max_num_seqs=8, max_model_len=256)
    engine.add("a", range(180), 10, 0.0)
    engine.step()
    assert reporter.report(0.0).num_admissible <= 1
