"""Stats and metrics agree on preemptions, swapping, pins and headroom."""

from __future__ import annotations

import logging

import pytest
from engines import Collector, make_engine, prompt, sampling
from exposition import samples
from simulated_run import LinearCost

from llmsched.engine.core import Engine
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.scheduler.token_budget import LEAST_PREFILL


def metric(engine: Engine, name: str) -> float:
    return samples(engine.metrics)[f"llmsched:{name}"]


def thrash(engine: Engine) -> Collector:
    """Serve many requests with short prompts and long outputs in a pool for a few of them."""
    collector = Collector(engine)
    for number in range(24):
        engine.add_request(str(number), prompt(8, number), sampling(max_tokens=70))
    collector.run()
    return collector


@pytest.mark.parametrize("swap_blocks", [0, 12])
def test_preemptions_show_in_stats_metrics_and_log(swap_blocks: int, caplog: pytest.LogCaptureFixture) -> None:
    mode = {"preemption_mode": "swap"} if swap_blocks else {}
    engine = make_engine(
        num_blocks=20, max_num_seqs=16, headroom=0.0, fast_lane_share=0.0, swap_blocks=swap_blocks, **mode
    )
    assert metric(engine, "max_running_requests") == 16
    with caplog.at_level(logging.INFO, logger="llmsched"):
        thrash(engine)
    stats = engine.stats()
    assert stats.num_headroom_changes == len(caplog.records) > 0
    assert "concurrency cap 16 -> " in caplog.records[0].getMessage()
    assert stats.headroom > 0
    assert stats.max_running < 16
    assert metric(engine, "headroom_changes_total") == stats.num_headroom_changes
    assert metric(engine, "kv_headroom_perc") == stats.headroom
    assert metric(engine, "max_running_requests") == stats.max_running
    assert metric(engine, "num_preemptions_total") == stats.num_preemptions > 0
    assert metric(engine, "recomputed_tokens_total") == stats.recomputed_tokens
    assert metric(engine, "num_swapped_out_total") == stats.num_swapped_out
    assert metric(engine, "num_swapped_in_total") == stats.num_swapped_in
    assert (stats.num_swapped_in > 0) is bool(swap_blocks)


def test_swap_space_in_use_is_shown() -> None:
    engine = make_engine(num_blocks=10, preemption_mode="swap", swap_blocks=20)
    collector = Collector(engine)
    for seed in (1, 2):
        engine.add_request(str(seed), prompt(48, seed), sampling(max_tokens=64))
    while not engine.stats().num_preemptions:
        collector.step()
    assert (engine.stats().host_blocks_used, engine.stats().host_blocks_total) == (5, 20)
    assert metric(engine, "swap_space_usage_perc") == 0.25
    collector.run()
    assert engine.stats().host_blocks_used == metric(engine, "swap_space_usage_perc") == 0


def test_the_step_budget_is_a_metric() -> None:
    clock = VirtualClock()  # step times without noise, so that the step-time model is always trusted
    engine = make_engine(num_blocks=64, max_num_batched_tokens=64, max_num_seqs=4, target_itl=1e-4, clock=clock)
    engine.executor = SimulatedExecutor(LinearCost(1.0, 0.01, 0.02, 1e-4), clock)
    assert metric(engine, "step_token_budget") == 64
    collector = Collector(engine)
    for number in range(4):
        engine.add_request(str(number), prompt(8, number), sampling(max_tokens=40))
    while engine.has_work() and metric(engine, "step_token_budget") == 64:
        collector.step()
    assert metric(engine, "step_token_budget") == 4 + LEAST_PREFILL
    collector.run()
