"""Steps that run out of memory at any point of their work: no token, block or request is lost."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from configs import resolved
from fakes import BLOCK, Harness, assert_right, make_request, tokens

from llmsched.engine.executor.base import StepPlan
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.scheduler.token_budget import RAISE_AFTER, Pacer

LAYOUTS = {
    "full": KVLayout(BLOCK),
    "some windows": KVLayout(BLOCK, 1, 2, 9),
    "windows": KVLayout(BLOCK, 0, 1, 40),
    "recurrent": KVLayout(BLOCK, recurrent=True),
}
MODES: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"preemption_mode": "swap", "swap_blocks": 60},
    "static": {"scheduling_policy": "static"},
}


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_request_gets_its_tokens(layout: str, mode: str, seed: int, looks_ahead: bool) -> None:
    """Many steps fail. Prompts share prefixes that end within a block, and the pool is too small."""
    random = Random(seed)
    # A failed step costs recurrent states, so that requests compute again what follows their last snapshots.
    share = 0.1 if LAYOUTS[layout].recurrent else 0.33
    groups = LAYOUTS[layout].num_groups
    settings = {"max_model_len": 150, "output_prediction": "none", "headroom": 0.0, **MODES[mode]}
    settings |= {"swap_blocks": groups * settings["swap_blocks"]} if "swap_blocks" in settings else {}
    it = Harness(14 * groups, 48, 8, layout=LAYOUTS[layout], looks_ahead=looks_ahead, **settings)
    pacer, failed, plans_with_copies = it.scheduler.pacer, 0, 0
    pacer._raise_after = 5
    launch = it.executor.launch

    def sometimes_fails(plan: StepPlan) -> Any:
        nonlocal failed, plans_with_copies
        if random.random() < share:
            it.executor.exhausted = [random.randint(0, 4 + len(plan.rows))]
            failed += 1
            plans_with_copies += bool(plan.copies or plan.swap_in or plan.swap_out or any(plan.state_moves))
        return launch(plan)

    it.executor.launch = sometimes_fails  # type: ignore[method-assign]
    requests = []
    for number in range(40):
        shared = random.choice([0, 23, 40, 70])
        prompt = tokens(shared, seed=random.randint(0, 1)) + tokens(random.randint(1, 25), seed=10 + number)
        priority = random.choice([0, 0, 1])
        requests.append(
            it.add(make_request(f"r{number}", prompt, random.randint(1, 50), arrival=it.time, priority=priority))
        )
        for _ in range(random.randint(0, 4)):
            if it.scheduler.has_work():
                it.step()
    it.run()
    assert_right(*requests)
    kv = it.scheduler.kv
    assert kv.pool.num_used == 0
    assert kv.swap.num_free == kv.swap.num_blocks
    ended = [name for plan in it.executor.plans for name in plan.finished] + it.scheduler._finished
    assert Counter(ended) == Counter(request.request_id for request in requests), "the executor hears of each once"
    assert failed > 50
    assert plans_with_copies > 0 or mode == "static"


def test_running_requests_are_preempted_down_to_the_budget() -> None:
    it = Harness(100, 16, 16)
    requests = [it.add(make_request(f"r{i}", tokens(4, seed=i), 30)) for i in range(12)]
    for _ in range(6):
        it.step()
    assert len(it.scheduler.running) == 12
    it.executor.exhausted = [0]
    it.step()
    assert it.scheduler.pacer.limit == 6
    assert len(it.scheduler.running) == 6
    assert it.scheduler.admission.is_full
    it.run()
    assert_right(*requests)


def test_one_token_is_the_smallest_budget() -> None:
    it = Harness(100, 16, 16)
    requests = [it.add(make_request(f"r{i}", tokens(40, seed=i), 5)) for i in range(3)]
    it.executor.exhausted = [2] * 9
    it.step()
    assert it.scheduler.pacer.limit == 1
    assert len(it.scheduler.running) == 1
    it.run()
    assert_right(*requests)


def test_the_budget_recovers_later_each_time() -> None:
    pacer = Pacer(resolved(max_num_batched_tokens=100))
    nothing = StepPlan(())

    def steps_until_raised() -> int:
        before, count = pacer.limit, 0
        while pacer.limit == before:
            pacer.learn(nothing, 0.0)
            count += 1
        return count

    pacer.lower(90)
    pacer.lower(45)  # a second failure before it was raised
    assert pacer.limit == 22
    assert [steps_until_raised(), pacer.limit] == [RAISE_AFTER, 44]
    assert [steps_until_raised(), pacer.limit] == [RAISE_AFTER, 88]
    pacer.lower(88)
    assert [steps_until_raised(), pacer.limit] == [2 * RAISE_AFTER, 88]
    assert [steps_until_raised(), pacer.limit] == [2 * RAISE_AFTER, 100]
    assert pacer.next_budget([], [], 0) == 100
