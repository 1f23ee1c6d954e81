"""Runners: their records of an engine's steps, and the predictions from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fakes import Harness, make_request, tokens

from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.tune.knobs import Setting
from llmsched.cli.tune.runners import EngineRunner, StepWatch, TrialLoad, others_cpu
from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import ObservedExecutor, StepPlan, StepResult
from llmsched.engine.executor.cost import StepShape
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent


def served(harness: Harness) -> StepWatch:
    """Serve requests with steps of 10 ms plus 0.1 ms per prefill token."""

    def timed(plan: StepPlan, result: StepResult) -> None:
        result.elapsed = 0.010 + 1e-4 * sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)

    harness.executor = ObservedExecutor(harness.executor, timed)  # type: ignore[assignment]
    watch = StepWatch(harness)  # type: ignore[arg-type]  # has the executor and the scheduler, as an Engine
    for number in range(6):
        harness.add(make_request(f"r{number}", tokens(90 + 40 * number, seed=number), max_tokens=40))
    harness.run()
    return watch


def test_what_steps_cost_is_learned() -> None:
    cost = served(Harness(200, budget=64)).cost()
    assert cost is not None
    overhead = cost.seconds(StepShape(0, 1, 100)) - 0.010
    assert -1e-6 < overhead < 0.005
    assert cost.seconds(StepShape(50, 1, 100)) - overhead == pytest.approx(0.015, rel=0.1)
    assert StepWatch(Harness(8)).cost() is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("own", "others"), [(70.0, 0.25), (0.0, 0.6), (130.0, 0.0)])
def test_the_share_of_other_processes(monkeypatch: pytest.MonkeyPatch, own: float, others: float) -> None:
    """Two cores are 60 % busy; `own` is this process's use in percent of one core."""
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 60.0)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda self: own)
    assert others_cpu(psutil.Process()) == pytest.approx(others)


def test_the_most_requests_in_one_step_are_counted() -> None:
    assert served(Harness(200, budget=64, max_num_seqs=3)).peak_running == 3


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_settings_are_predicted_from_the_steps_of_others(tiny_model: Callable[..., Path], arch: str) -> None:
    """Models with and without sliding windows are predicted, and each run reports its own peak demand."""
    config = EngineConfig(str(tiny_model(arch)), device="cpu", max_num_batched_tokens=128, num_gpu_blocks_override=128)
    load = SyntheticLoad(num_prompts=8, input_len=60, output_len=20, max_concurrency=4)
    settings = [Setting(budget, 8) for budget in (16, 32, 128)]

    async def main() -> None:
        runner = EngineRunner(config, TrialLoad(load, Slo(itl=1.0), 60.0), silent)
        try:
            assert runner.predict(settings, 8) == {}
            run = await runner.run(settings[0], 8, 0)
            predicted = runner.predict(settings, 8)
            alone = await runner.run(settings[0], 1, 1)
        finally:
            await runner.close()
        assert list(predicted) == settings
        assert all(each.completed == 8 and each.tokens_per_s for each in predicted.values())
        assert run.demand is not None
        assert alone.demand is not None
        foreseen = predicted[settings[0]].demand
        assert foreseen is not None
        assert foreseen.running == run.demand.running
        # Requests of a real run arrive between steps, so a request may hold a block that it does not in the simulation.
        assert foreseen.kv_share == pytest.approx(run.demand.kv_share, abs=4 / 128)
        assert run.demand.running == 4
        assert 0 < alone.demand.kv_share < run.demand.kv_share < 1
        assert not run.demand.preempted
        assert alone.demand.running == 1

    asyncio.run(main())
