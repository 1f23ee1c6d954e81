"""Default pace of prefills: steps in which requests decode stay short, and the delay of prefills is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from configs import resolved
from fakes import make_request
from simulated_run import LinearCost, SimulatedTimes, simulate

from llmsched.engine.executor.base import ScheduledRow, StepPlan
from llmsched.engine.executor.cost import StepShape
from llmsched.engine.executor.simulated_executor import SimulatedExecutor, VirtualClock
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.baselines import make_scheduler
from llmsched.engine.scheduler.token_budget import EXTRA, EXTRA_SHARED, LEARN_EVERY, Pacer

#: A slow device: a prompt of 256 tokens takes a second, a decode of eight requests 76 ms.
SLOW = LinearCost(0.02, 4e-3, 7e-3, 0.0)
#: A device so fast that whole steps of 256 tokens stay below LEAST_TARGET.
FAST = LinearCost(1e-3, 1e-4, 1e-4, 0.0)


class Run:
    """One load on a simulated device: the times of its requests, and the plans and ends of its steps."""

    def __init__(self, requests: list[Request], cost: LinearCost = SLOW, **knobs: Any) -> None:
        clock = VirtualClock()
        config = resolved(**{"max_num_batched_tokens": 256, "max_num_seqs": 32} | knobs)
        self.scheduler = make_scheduler(KVManager(2000, KVLayout(16)), config, clock)
        self.plans: list[StepPlan] = []
        self.times = simulate(requests, self.scheduler, SimulatedExecutor(cost, clock), clock, self.plans.append)
        self.duration = clock.now

    def of(self, name: str) -> list[SimulatedTimes]:
        return [times for times in self.times if times.request.request_id.startswith(name)]

    def longest_gap(self, name: str) -> float:
        return max(gap for times in self.of(name) for gap in times.gaps)


def chats_and_late(prompts: int = 1) -> list[Request]:
    """Make 8 requests that decode for a while, and prompts of 256 tokens that arrive in the meantime."""
    chats = [make_request(f"chat{i}", [i] * 20, 100, arrival=0.0) for i in range(8)]
    return chats + [make_request(f"late{i}", [50 + i] * 256, 4, arrival=3.0) for i in range(prompts)]


def alone(decodes: int) -> float:
    return SLOW.seconds(StepShape(0, decodes, 0))


def test_a_prompt_delays_decodes_by_twice_their_own_time() -> None:
    paced, whole = Run(chats_and_late()), Run(chats_and_late(), target_itl=60.0)
    assert whole.longest_gap("chat") > 1.0
    assert paced.longest_gap("chat") <= 1.1 * (1 + EXTRA) * alone(8)
    assert paced.of("late")[0].ttft < 1.7 * whole.of("late")[0].ttft
    assert paced.duration < 1.03 * whole.duration


def test_the_more_prompts_wait_the_less_they_are_delayed() -> None:
    paced, whole = Run(chats_and_late(16)), Run(chats_and_late(16), target_itl=60.0)
    last = [max(times.ttft for times in run.of("late")) for run in (paced, whole)]
    assert last[0] < 1.25 * last[1]
    assert paced.duration < 1.03 * whole.duration


def test_prompts_are_computed_whole_while_no_request_decodes_and_on_a_fast_device() -> None:
    load = [*chats_and_late(), make_request("after", [90] * 256, 4, arrival=60.0)]
    rows = [row for plan in Run(load).plans for row in plan.rows]
    assert next(row.num_tokens for row in rows if row.sequence.request_id == "after") == 256
    assert max(plan.num_tokens for plan in Run(chats_and_late(), FAST).plans[1:]) == 256


def trained() -> Pacer:
    pacer = Pacer(resolved(max_num_batched_tokens=4096))
    for i in range(60):
        shape = StepShape(i * 37 % 256, 1 + i * 11 % 16, 0)
        pacer.model.learn(shape, SLOW.seconds(shape))
    return pacer


def test_one_pause_of_the_machine_changes_the_budget_little() -> None:
    pacer, decodes = trained(), [make_request(f"r{i}", [1] * 100) for i in range(8)]
    before = pacer.next_budget(decodes, [], 1)
    rows = [ScheduledRow(request, 99, 1, np.zeros((1, 7), np.int32), True) for request in decodes]
    for _ in range(LEARN_EVERY):
        pacer.learn(StepPlan(rows), 60.0)
    assert pacer.next_budget(decodes, [], 1) - 8 == pytest.approx(before - 8, rel=0.5)


def test_tokens_that_are_not_computed_yet_are_no_kv() -> None:
    pacer, decodes = trained(), [make_request(f"r{i}", [1] * 100) for i in range(8)]
    for i in range(60):
        shape = StepShape(i * 37 % 256, 1 + i * 11 % 16, i * 97 % 3000)
        pacer.model.learn(shape, SLOW.seconds(shape) + 1e-5 * shape.kv_tokens)
    budget = pacer.next_budget(decodes, [], 1)
    assert pacer.next_budget(decodes, [make_request("long", [1] * 100_000)], 0) == budget


def test_prompts_keep_their_pace_after_preemptions_have_lowered_max_running() -> None:
    scheduler = make_scheduler(KVManager(2000, KVLayout(16)), resolved(max_num_seqs=32), VirtualClock())
    for request in chats_and_late():
        scheduler.add(request)
    scheduler.advance(scheduler.schedule())
    assert len(scheduler.running) == 9
    while not scheduler.admission.control.preempted(9):
        pass
    assert scheduler.admission.control.max_running < 9
    scheduler.add(make_request("waits", [99] * 20, 4, arrival=0.0))
    assert scheduler.admission.worth_trying
    assert scheduler.admission.num_startable == 0


@pytest.mark.parametrize("policy", ["fcfs", "static"])
def test_baselines_have_no_pace(policy: str) -> None:
    run = Run(chats_and_late(16), scheduling_policy=policy)
    assert max(plan.num_tokens for plan in run.plans[1:]) == 256


def test_explain_tells_the_pace() -> None:
    run = Run(chats_and_late())
    entries = run.scheduler.ledger.entries("late0")
    paced, rest = (entry.details for entry in entries if entry.what == "computed")
    assert (paced["reason"], paced["decoding"], "reason" in rest) == ("itl", 8, False)
    assert paced["step_ms"] == pytest.approx(1e3 * (1 + EXTRA) * alone(8), rel=0.05)


@pytest.mark.parametrize(
    ("decodes", "prefills", "seconds"),
    [
        (8, 1, (1 + EXTRA) * alone(8)),
        (8, 4, (1 + EXTRA) * alone(8)),
        (8, 16, (1 + EXTRA_SHARED * 2) * alone(8)),
        (1, 1, (1 + EXTRA_SHARED) * alone(1)),
    ],
)
def test_time_of_a_step_without_target(decodes: int, prefills: int, seconds: float) -> None:
    pacer = trained()
    running = [make_request(f"r{i}", [1] * 100) for i in range(decodes)]
    budget = pacer.next_budget(running, [], prefills)
    assert SLOW.seconds(StepShape(budget - decodes, decodes, 0)) == pytest.approx(seconds, rel=0.05)
    assert pacer.pace == {"reason": "itl", "step_ms": pytest.approx(1e3 * seconds, rel=0.05), "decoding": decodes}
    assert pacer.next_budget(running, [], 0) == pacer.next_budget([], [], prefills) == 4096
    assert not pacer.pace
